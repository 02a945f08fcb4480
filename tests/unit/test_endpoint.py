import pytest

from datastore_service.endpoint import Endpoint, parse_endpoint


@pytest.mark.parametrize(
    ("text", "endpoint", "target", "local"),
    [
        ("127.0.0.1:5000", Endpoint("127.0.0.1", 5000), "127.0.0.1:5000", True),
        ("localhost:0", Endpoint("localhost", 0), "localhost:0", True),
        ("[::1]:5000", Endpoint("::1", 5000), "[::1]:5000", True),
        ("0.0.0.0:5000", Endpoint("0.0.0.0", 5000), "0.0.0.0:5000", False),
        ("datastore:5000", Endpoint("datastore", 5000), "datastore:5000", False),
        ("unix:run/s.sock", Endpoint(path="run/s.sock"), "unix:run/s.sock", True),
        ("unix:///run/s.sock", Endpoint(path="/run/s.sock"), "unix:/run/s.sock", True),
        (
            "unix:/run/a#%20?ü\udcff",
            Endpoint(path="/run/a#%20?ü\udcff"),
            "unix:/run/a%23%2520%3F%C3%BC%FF",
            True,
        ),
    ],
)
def test_spellings(text, endpoint, target, local):
    parsed = parse_endpoint(text)
    assert (parsed, parsed.target, parsed.local) == (endpoint, target, local)
    assert parse_endpoint(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":5000", "host:port", "host:-1", "http://host:80", "host:١", "unix:"]
)
def test_malformed_names_the_field(text):
    with pytest.raises(ValueError, match="^listen: "):
        parse_endpoint(text, "listen")


def test_limits_are_named():
    with pytest.raises(ValueError, match="port 65536 exceeds 65535"):
        parse_endpoint("host:65536")
    with pytest.raises(ValueError, match="socket path of 108 bytes exceeds 107"):
        parse_endpoint("unix:" + "a" * 108)
    with pytest.raises(ValueError, match="socket path of 108 bytes exceeds 107"):
        parse_endpoint("unix:" + "ü" * 54)


@pytest.mark.parametrize("path", ["a,b", "a\0b"])
def test_what_no_socket_can_be_called(path):
    with pytest.raises(ValueError, match="^listen: socket path .* has a comma or a NUL$"):
        parse_endpoint(f"unix:{path}", "listen")
