"""The operator's options: flag > environment > file > default, validated once, then frozen.

The launcher writes the flags into the environment (`export_flags`), so that the processes SGLang spawns read
the same values; every process then calls `load_options`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from datastore_service.client import Access, check_prior, read_token
from datastore_service.endpoint import parse_endpoints
from datastore_service.tls import client_tls

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "SPECSTORE_"
CONFIG_FILE_VARIABLE = "SPECSTORE_CONFIG"
MAX_DRAFT_ROWS = 256
ALIKE = 0.9  # share of two names that is the same, from which on one may be the other mistyped
CONVERSATION_SOURCE = re.compile(r"agents|header:[\w-]+|body:[\w-]+(\.[\w-]+)*", re.ASCII)
MAX_NODES = 63  # no hardware we know gains from more than 64 rows per request (SSSD section 3.2 caps at 32)


def _option(default: Any, meaning: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": meaning, "choices": choices})


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one SGLang instance."""

    endpoint: str = _option(
        "embedded",
        "datastore: 'embedded', 'HOST:PORT' or 'unix:PATH'; several, separated by commas, share the sessions",
    )
    prior: str = _option("", "directory of a prior for the embedded datastore (a service has its own)")
    tls_ca: str = _option(
        "", "TLS: file with the certificates (PEM) of the authority that signed the service's certificate"
    )
    tls_certificate: str = _option("", "client certificate (PEM), for a service that asks for one")
    tls_key: str = _option("", "private key (PEM) of the client certificate")
    token_file: str = _option(
        "",
        "file with the token or the JWT to show to a service that asks who calls; read again for each connection",
    )
    tenant: str = _option("", "tenant part of the namespace: text never crosses from one tenant to another")
    request_tenant: str = _option(
        "",
        "where a request names its tenant: 'header:NAME' (of the HTTP request, set by a gateway), 'custom_params' (specstore.tenant in it), "
        "or empty for one tenant",
    )
    request_conversation: str = _option(
        "agents",
        "where a request names the session that it belongs to, its conversation: 'header:NAME' or 'body:FIELD', 'agents' (the names that "
        "agents send anyway), several, separated by commas; 'off' for custom_params alone",
    )
    request_wishes: str = _option(
        "conversation,draft,group,nodes,priors,publish,reference,sources,user",
        "the wishes that requests may have in custom_params.specstore, separated by commas; 'off' for none. Other wishes are refused. Where "
        "requests name their tenant, --specstore-request-tenant says",
    )
    deadline_ms: float = _option(5.0, "longest wait for a draft in a decode step, in milliseconds")
    nodes: int = _option(
        15,
        f"maximum drafted tokens per request and step, 1 to {MAX_NODES}; beside a head more if --speculative-num-draft-tokens asks for more",
    )
    length: str = _option(
        "adaptive",
        "speculation length: adaptive follows measured step times, static always verifies --specstore-nodes",
        ("adaptive", "static"),
    )
    beside_head: str = _option(
        "off",
        "retrieval beside the model's own head, verified as one tree with its drafts: with SGLang's --speculative-algorithm EAGLE, EAGLE3, NEXTN or STANDALONE and its flags; off leaves that algorithm alone",
        ("off", "on"),
    )
    draft_device: str = _option(
        "",
        "device of the draft model: cpu, cuda or cuda:N; empty for the method's own: cpu with DUO or beside a target on a CPU, else the first GPU after the target's, if nobody uses it. A device that is given serves all replicas",
    )
    draft_tokens: int = _option(32768, "slots of the draft model's KV cache, in tokens")
    draft_rows: int = _option(
        24, f"rows of a draft forward, and outcomes of a step that are drafted for, 1 to {MAX_DRAFT_ROWS}"
    )
    draft_lookahead: int = _option(
        7,
        f"tokens drafted after each guessed outcome, 1 to {MAX_NODES} (SAGUARO, MIRROR; other methods draft --specstore-nodes at most)",
    )
    draft_phrase: int = _option(
        10,
        f"tokens of the datastore that a draft forward checks at most, 0 to {MAX_NODES} (DOUBLE, ADAPTIVE); with 0 it drafts one token",
    )
    early_exit: str = _option(
        "",
        "file of the target's early exits, made by `python -m sglang_patches.training exits`; MIRROR needs one",
    )
    early_exit_layer: int = _option(
        0,
        "layers of the target below the early exit, of those that the file has; 0 for the one in the middle",
    )
    fallback: str = _option(
        "datastore",
        "after an outcome that was not guessed: datastore, which waits for the draft model where that is worth it; draft, which always waits, at most a second; none",
        ("datastore", "draft", "none"),
    )
    publish: str = _option(
        "on", "whether finished outputs enter the live tier, unless a request forbids it", ("on", "off")
    )

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"specstore option nodes: {self.nodes} is outside 1..{MAX_NODES}")
        if not re.fullmatch(r"|cpu|cuda(:\d+)?", self.draft_device):
            raise ValueError(
                f"specstore option draft_device: {self.draft_device!r} is not cpu, cuda or cuda:N"
            )
        if self.draft_tokens < 1:
            raise ValueError(f"specstore option draft_tokens: {self.draft_tokens} is below 1")
        if not re.fullmatch(r"|custom_params|header:[A-Za-z0-9-]+", self.request_tenant):
            raise ValueError(
                f"specstore option request_tenant: {self.request_tenant!r} is not custom_params or header:NAME"
            )
        for source in self.conversation_sources:
            if not CONVERSATION_SOURCE.fullmatch(source):
                raise ValueError(
                    f"specstore option request_conversation: {source!r} is not agents, header:NAME or body:FIELD"
                )
        if not 1 <= self.draft_rows <= MAX_DRAFT_ROWS:
            raise ValueError(f"specstore option draft_rows: {self.draft_rows} is outside 1..{MAX_DRAFT_ROWS}")
        if not 1 <= self.draft_lookahead <= MAX_NODES:
            raise ValueError(
                f"specstore option draft_lookahead: {self.draft_lookahead} is outside 1..{MAX_NODES}"
            )
        if not 0 <= self.draft_phrase <= MAX_NODES:
            raise ValueError(f"specstore option draft_phrase: {self.draft_phrase} is outside 0..{MAX_NODES}")
        if not 0 < self.deadline_ms <= 10_000:
            raise ValueError(f"specstore option deadline_ms: {self.deadline_ms} is outside (0, 10000]")
        if not self.embedded:
            parse_endpoints(self.endpoint, "specstore option endpoint")
        if self.prior and self.endpoint != "embedded":
            raise ValueError(
                "specstore option prior: only with endpoint 'embedded'; a service has its own prior"
            )
        for name in ("tls_ca", "token_file"):
            if getattr(self, name) and self.embedded:
                raise ValueError(f"specstore option {name}: endpoint {self.endpoint!r} has no connection")
        for option in dataclasses.fields(self):
            choices = option.metadata["choices"]
            if choices and getattr(self, option.name) not in choices:
                raise ValueError(
                    f"specstore option {option.name}: {getattr(self, option.name)!r} is not one of {', '.join(choices)}"
                )

    @property
    def embedded(self) -> bool:
        """Whether the datastore is in this process."""
        return self.endpoint.partition(":")[0] == "embedded"

    @property
    def conversation_sources(self) -> list[str]:
        """The places, in order, where a request may name the session that it belongs to."""
        return [] if self.request_conversation == "off" else self.request_conversation.split(",")

    @property
    def permitted_wishes(self) -> list[str]:
        """The wishes that requests may have."""
        return [] if self.request_wishes == "off" else self.request_wishes.split(",")

    def access(self) -> Access:
        """What to show to a service. Reads the files: raises OSError, and ValueError that names the option of an unusable one."""
        tls = client_tls(self.tls_ca, self.tls_certificate, self.tls_key)
        return Access(tls, read_token(self.token_file) if self.token_file else "")


def _parse(option: dataclasses.Field, value: Any) -> Any:
    kind: Callable[[Any], Any] = type(option.default)
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"specstore option {option.name}: {value!r} is not a valid {type(option.default).__name__}"
        ) from None


def _from_file(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        try:
            values = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
    kinds = {option.name: type(option.default) for option in dataclasses.fields(Options)}
    for name, value in values.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{path}: unknown specstore option {name}{hint} (keys stand at the top, with underscores)"
            )
        # An integer is a number too, but true is not 1 and 3.7 is not 3.
        if type(value) not in (kinds[name], *((int,) if kinds[name] is float else ())):
            raise ValueError(
                f"{path}: specstore option {name}: {value!r} is not a valid {kinds[name].__name__}"
            )
    return values


def load_options(environment: Mapping[str, str] | None = None) -> Options:
    """Options of this process. Raises ValueError naming the option, OSError for an unreadable file."""
    environment = os.environ if environment is None else environment
    path = environment.get(CONFIG_FILE_VARIABLE)
    values = _from_file(path) if path else {}
    for option in dataclasses.fields(Options):
        variable = ENVIRONMENT_PREFIX + option.name.upper()
        if variable in environment:
            values[option.name] = environment[variable]
    return Options(
        **{o.name: _parse(o, values[o.name]) for o in dataclasses.fields(Options) if o.name in values}
    )


def check_options() -> None:
    """Reads the options and the files that they name, before a model is loaded. Raises ValueError or OSError, in words for who has set
    them. Logs a variable that is mistyped."""
    options = load_options()
    options.access()
    if options.prior:
        check_prior(options.prior)
    known = [ENVIRONMENT_PREFIX + option.name.upper() for option in dataclasses.fields(Options)]
    for variable in os.environ:
        near = difflib.get_close_matches(variable, known, 1, ALIKE)
        if variable.startswith(ENVIRONMENT_PREFIX) and near and near[0] != variable:
            logger.warning("specstore: %s is no option, did you mean %s?", variable, near[0])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`--specstore-*` flags on SGLang's own parser."""
    group = parser.add_argument_group("specstore")
    group.add_argument(
        "--specstore-config", metavar="FILE", help="TOML file with these options, without the prefix"
    )
    for option in dataclasses.fields(Options):
        choices = option.metadata["choices"]
        # A value is checked where those of the environment and the file are: SGLang's parser would print 500 lines of usage first.
        switch: dict[str, Any] = {"nargs": "?", "const": "on"} if set(choices) == {"on", "off"} else {}
        group.add_argument(
            "--specstore-" + option.name.replace("_", "-"),
            help=f"{option.metadata['help']} (default: {option.default})",
            metavar=f"{{{','.join(choices)}}}" if choices else None,
            **switch,
        )


def export_flags(arguments: argparse.Namespace) -> list[str]:
    """Makes the given flags visible to this process's `load_options` and to its children's. Returns their names."""
    names = ["config", *(option.name for option in dataclasses.fields(Options))]
    given = {name: getattr(arguments, f"specstore_{name}", None) for name in names}
    values = {name: value for name, value in given.items() if value is not None}
    os.environ |= {ENVIRONMENT_PREFIX + name.upper(): value for name, value in values.items()}
    return ["--specstore-" + name.replace("_", "-") for name in values]
