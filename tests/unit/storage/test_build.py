import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from datastore_service.storage.build import build_prior, vocabulary_size
from datastore_service.storage.checksummed_json import write_checksummed
from datastore_service.storage.errors import StorageError
from datastore_service.storage.manifest import MANIFEST, open_segments, read_manifest
from datastore_service.storage.parts import build_here, parts_of
from tests.unit.storage.conftest import WORDS, write_tokenizer


def documents(directory):
    return [s.document(i).tolist() for s in open_segments(directory) for i in range(s.documents)]


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_kind_of_source(tmp_path, tokenizer_folder):
    (tmp_path / "b.txt").write_text("c d")
    parquet.write_table(pa.table({"say": ["e f", "g"], "x": [1, 2]}), tmp_path / "c.parquet")
    np.save(tmp_path / "d.npy", np.array([8, 9], dtype=np.uint16))
    np.save(tmp_path / "e.npy", np.array([[1, 2], [3, 4]]))
    sources = [
        jsonl(tmp_path / "a.jsonl", {"say": "a b"}, {"say": [3, 2, 1]}),
        *(tmp_path / name for name in ("b.txt", "c.parquet", "d.npy", "e.npy")),
    ]
    out = tmp_path / "prior"
    manifest = build_prior(sources, out, tokenizer_folder, field="say")
    assert documents(out) == [[1, 2], [3, 2, 1], [3, 4], [5, 6], [7], [8, 9], [1, 2], [3, 4]]
    assert manifest == read_manifest(out)
    assert (manifest.vocab_size, manifest.source, manifest.documents) == (11, "", 0)


def test_segments_are_bounded_and_progress_is_told(tmp_path, tokenizer_folder):
    source = jsonl(tmp_path / "a.jsonl", *({"text": "a b c"} for _ in range(5)), {"text": "a " * 20})
    seen = []
    build_prior([source], tmp_path / "p", tokenizer_folder, segment_tokens=7, progress=seen.append)
    assert [len(segment) for segment in open_segments(tmp_path / "p")] == [6, 6, 3, 20]
    assert [(p.documents, p.tokens, p.segments) for p in seen] == [
        (2, 6, 1),
        (4, 12, 2),
        (5, 15, 3),
        (6, 35, 4),
    ]


def test_a_finished_prior_is_appended_to(tmp_path, tokenizer_folder):
    for text in ("a b", "c d"):
        build_prior([jsonl(tmp_path / "a.jsonl", {"text": text})], tmp_path / "p", tokenizer_folder)
    assert documents(tmp_path / "p") == [[1, 2], [3, 4]]


def test_a_prior_of_another_tokenizer_is_not_appended_to(tmp_path, tokenizer_folder):
    source = jsonl(tmp_path / "a.jsonl", {"text": "a b"})
    build_prior([source], tmp_path / "p", tokenizer_folder)
    before = (tmp_path / "p" / MANIFEST).read_bytes()
    other = write_tokenizer(tmp_path / "other", [*WORDS, "k"])
    with pytest.raises(StorageError, match=r"manifest\.json: tokenizer: built with"):
        build_prior([source], tmp_path / "p", other)
    assert (tmp_path / "p" / MANIFEST).read_bytes() == before
    with pytest.raises(StorageError, match="tokenizer: built with"):
        open_segments(tmp_path / "p", tokenizer="00" * 32)


def test_a_killed_build_goes_on_after_its_last_finished_segment(tmp_path, tokenizer_folder):
    source = jsonl(tmp_path / "a.jsonl", *({"text": f"{a} b c"} for a in "abcdefgh"))
    program = f"""
        import os, signal
        from datastore_service.storage import build
        finished = []
        write = build.write_segment
        def write_and_die(path, *rest):
            if len(finished) == 2:
                write(path, *rest)  # written, but not yet in the manifest
                os.kill(os.getpid(), signal.SIGKILL)
            finished.append(path)
            write(path, *rest)
        build.write_segment = write_and_die
        build.build_prior([{str(source)!r}], {str(tmp_path / "p")!r}, {str(tokenizer_folder)!r}, segment_tokens=6)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert read_manifest(tmp_path / "p").documents == 4
    built = (tmp_path / "p" / "000000.seg").stat().st_mtime_ns
    with pytest.raises(StorageError, match="source: an unfinished build of other files"):
        build_prior([jsonl(tmp_path / "b.jsonl", {"text": "a"})], tmp_path / "p", tokenizer_folder)
    build_prior([source], tmp_path / "p", tokenizer_folder, segment_tokens=6)
    assert documents(tmp_path / "p") == [[i, 2, 3] for i in range(1, 9)]
    assert (tmp_path / "p" / "000000.seg").stat().st_mtime_ns == built
    assert sorted(os.listdir(tmp_path / "p")) == [*(f"00000{i}.seg" for i in range(4)), MANIFEST]


def test_a_corpus_is_divided_between_files(tmp_path):
    paths = [tmp_path / f"{i}.txt" for i in range(6)]
    for path, size in zip(paths, (0, 4, 6, 11, 1, 9), strict=True):
        path.write_text("a" * size)
    parts = parts_of(paths, 10)
    assert [part.number for part in parts] == [0, 1, 2]
    assert [part.paths for part in parts] == [tuple(paths[:3]), tuple(paths[3:4]), tuple(paths[4:])]


def test_no_segment_reaches_beyond_its_part_and_a_stopped_build_goes_on_within_it(tmp_path, tokenizer_folder):
    """Each file is a part. The build stops after the second segment of the second one, and goes on there."""
    texts = [[{"text": f"{a} b c"} for a in letters] for letters in ("abc", "defgh", "ij")]
    sources = [jsonl(tmp_path / f"{i}.jsonl", *rows) for i, rows in enumerate(texts)]
    built = []

    def stopping(recipe, parts):
        for one in build_here(recipe, parts):
            yield one
            built.append((one.part, one.documents))
            if built == [(0, 2), (0, 3), (1, 2), (1, 4)]:
                raise KeyboardInterrupt

    def build():
        return build_prior(sources, tmp_path / "p", tokenizer_folder, segment_tokens=6, builder=stopping)

    with pytest.raises(KeyboardInterrupt):
        build()
    unfinished = read_manifest(tmp_path / "p")
    assert (unfinished.part, unfinished.documents, len(unfinished.segments)) == (1, 4, 4)
    finished = build()
    assert built[4:] == [(1, 5), (2, 2)]
    assert (finished.source, finished.part, finished.documents) == ("", 0, 0)
    assert documents(tmp_path / "p") == [[i, 2, 3] for i in range(1, 11)]


def test_a_manifest_of_an_earlier_version_has_no_part(tmp_path, tokenizer_folder):
    build_prior([jsonl(tmp_path / "a.jsonl", {"text": "a"})], tmp_path / "p", tokenizer_folder)
    path = tmp_path / "p" / MANIFEST
    fields = json.loads(path.read_text())
    del fields["checksum"], fields["part"]
    write_checksummed(path, fields)
    assert read_manifest(tmp_path / "p").part == 0


def test_an_error_of_a_file_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(StorageError("a.jsonl", "line 2", "not JSON")))
    assert (type(error), str(error), error.field) == (StorageError, "a.jsonl: line 2: not JSON", "line 2")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": [1, 11]}], r"a\.jsonl: document 1: tokens: id 11 is outside \[0, 11\)"),
        ([{"text": "a"}, {"text": [-1]}], r"line 2: id -1 is outside"),
        ([{"other": "a"}], r"a\.jsonl: line 1: no JSON object with a field 'text'"),
        ([{"text": "a"}, 7], r"a\.jsonl: line 2: no JSON object"),
        ([{"text": {"a": 1}}], r"line 1: neither a string nor a list"),
        ([], r"a\.jsonl: corpus: holds no tokens"),
        ([{"text": ""}, {"text": []}], r"a\.jsonl: corpus: holds no tokens"),
    ],
)
def test_bad_corpora_are_refused_with_their_place(tmp_path, tokenizer_folder, rows, message):
    with pytest.raises(StorageError, match=message):
        build_prior([jsonl(tmp_path / "a.jsonl", *rows)], tmp_path / "p", tokenizer_folder)


def test_unreadable_sources_are_named(tmp_path, tokenizer_folder):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "a.parquet").write_text("no")
    (tmp_path / "a.npy").write_text("no")
    np.save(tmp_path / "f.npy", np.zeros(3))
    parquet.write_table(pa.table({"x": ["a"]}), tmp_path / "b.parquet")
    for name, message in {
        "a.txt": "not UTF-8",
        "a.parquet": "not Parquet",
        "a.npy": "not an .npy array",
        "f.npy": "not 1-D or 2-D integers",
        "b.parquet": "no such column",
        "none.txt": "no such file",
    }.items():
        with pytest.raises(StorageError, match=rf"{name}: .*{message}"):
            build_prior([tmp_path / name], tmp_path / "p", tokenizer_folder)


def test_vocabulary_size_counts_to_the_largest_id(tokenizer_folder):
    assert vocabulary_size(tokenizer_folder) == len(WORDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "format: 3, this program reads 1 and 2"),
        ({"format": 2}, "checksum: does not match"),
        ({"segments": "x"}, "segments: missing or not list"),
        ({"segments": ["../a.seg"]}, "segments: not a list of names"),
        ({"segments": [".."]}, "segments: not a list of names"),
        ({"segments": ["a.seg", "a.seg"]}, "segments: not a list of names"),
        ({"segments": [5]}, "segments: not a list of names"),
        ({"tokenizer": None}, "tokenizer: missing or not str"),
        ({"vocab_size": True}, "vocab_size: missing or not int"),
        ({"part": -1}, "part: -1 is below 0"),
        ({"documents": "3"}, "documents: missing or not int"),
    ],
)
def test_a_wrong_manifest_is_named(tmp_path, tokenizer_folder, change, message):
    build_prior([jsonl(tmp_path / "a.jsonl", {"text": "a"})], tmp_path / "p", tokenizer_folder)
    path = tmp_path / "p" / MANIFEST
    fields = json.loads(path.read_text())
    del fields["checksum"]
    path.write_text(json.dumps(fields | {"format": 1} | change))
    with pytest.raises(StorageError, match=rf"manifest\.json: {message}"):
        read_manifest(tmp_path / "p")


def test_an_unreadable_manifest_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"manifest\.json: file: No such file"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(StorageError, match=r"manifest\.json: file: not JSON"):
        read_manifest(tmp_path)
