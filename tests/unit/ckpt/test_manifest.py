"""What a manifest may say, and that everything else is refused with one clear error."""

import json
import os
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import pytest
from forging import forged
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.format.manifest import (
    VERSION,
    CheckpointError,
    Dataset,
    File,
    Manifest,
    StoredBlock,
    Tensor,
    encode,
    encode_meta,
    name_error,
    named,
    nesting_error,
    unmatched_error,
)
from ckpt.format.validation import decode


def make():
    """Two files: `w` in two blocks of rows, `s` a scalar, `e` empty."""
    files = (
        File("rank-00000.h5", 4096, {"float32": Dataset(2048, 33)}, "5" * 16),
        File("rank-00001.h5", 4096, {"float32": Dataset(2048, 4), "int64": Dataset(2112, 1)}, "6" * 16),
    )
    tensors = {
        "model/w": Tensor(
            name="model/w",
            dtype="float32",
            shape=(3, 2),
            axes=("dp", None),
            blocks=(StoredBlock(0, 16, (0, 0), (2, 2), "7" * 16), StoredBlock(1, 0, (2, 0), (1, 2), "8" * 16)),
        ),
        "opt/s": Tensor(name="opt/s", dtype="int64", shape=(), blocks=(StoredBlock(1, 0, (), (), "9" * 16),)),
        "opt/e": Tensor(name="opt/e", dtype="int64", shape=(0, 5), blocks=()),
    }
    return Manifest(
        files,
        tensors,
        {"step": 3, "lr": [0.1, None]},
        sequence=4,
        saved=1.5,
        num_ranks=2,
        release="0.1.0 (commit unknown)",
    )


def forge(edit, data=None):
    """A manifest whose lines went through `edit(header, meta, tensors)`, with a checksum that fits again."""
    return forged(data or encode(make()), edit)


def test_decode_is_the_inverse_of_encode():
    assert decode(encode(make())) == make()


def test_every_altered_byte_is_noticed():
    data = encode(make())
    for position in range(len(data)):
        for bit in (0, 3, 6):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                decode(bytes(altered))


def test_every_truncation_is_noticed():
    data = encode(make())
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            decode(data[:length])


def test_version_1_is_read():
    def older(header, meta, tensors):
        header["version"] = 1
        del header["ranks"]
        for file in header["files"]:
            del file["rest"]
        del tensors[0]["axes"]

    manifest = decode(forge(older))
    assert manifest.tensors.keys() == make().tensors.keys() and manifest.files[0].rest is None
    assert manifest.num_ranks == 0


@pytest.mark.parametrize("told", [None, 7, {"version": "9"}, ["9"], "9\x1b[2J", "9\n", "\ud800", "9" * 201, "absent"])
def test_an_odd_release_is_no_damage(told):
    def other(header, meta, tensors):
        header["release"] = told
        if told == "absent":  # as in checkpoints of older releases
            del header["release"]

    assert decode(forge(other)) == replace(make(), release="")


def test_what_came_with_version_3_is_not_read_by_older_programs():
    assert json.loads(encode(make()).split(b"\n")[0])["version"] == 2
    tensor = Tensor(name="c", dtype="complex64", shape=(0,), blocks=())
    manifest = replace(make(), tensors={"c": tensor})
    assert json.loads(encode(manifest).split(b"\n")[0])["version"] == 3 and decode(encode(manifest)) == manifest


def test_newer_formats_are_refused_by_name():
    data = forge(lambda header, meta, tensors: header.update(version=VERSION + 1))
    with pytest.raises(CheckpointError, match=rf"version {VERSION + 1}, and this program reads up to {VERSION}"):
        decode(data)
    # also if a newer format ends otherwise
    with pytest.raises(CheckpointError, match=f"version {VERSION + 1}"):
        decode(data.replace(b"xxh3", b"else"))


def _set(key, value):
    return lambda header, meta, tensors: header.update({key: value})


def _tensor(**changes):
    return lambda header, meta, tensors: tensors[0].update(changes)


def _block(i=0, **changes):
    return lambda header, meta, tensors: tensors[0]["blocks"][i].update(changes)


def _file(**changes):
    return lambda header, meta, tensors: header["files"][0].update(changes)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("format", "safetensors"), "format is 'safetensors'"),
        (_set("version", "1"), "Expected `int`, got `str` - at `$.version`"),
        (_set("version", True), "Expected `int`, got `bool` - at `$.version`"),
        (_set("byteorder", "big"), "byte order 'big'"),
        (_set("saved", "today"), "Expected `float`, got `str` - at `$.saved`"),
        (_set("chunk_bytes", 1 << 40), "chunk_bytes"),
        (_set("chunk_bytes", 65), "multiple of 64 - at `$.chunk_bytes`"),
        (_set("tensors", 4), "3 tensors, its header says 4"),
        (_set("files", {}), "Expected `array`, got `object` - at `$.files`"),
        (_file(name="../rank-00000.h5"), "no plain name"),
        (_file(name="/etc/passwd"), "no plain name"),
        (_file(name=".."), "no plain name"),
        (_file(name="a\\b"), "no plain name"),
        (_file(name="a\0b"), "no plain name"),
        (_file(name=7), "Expected `str`, got `int` - at `$.files[0].name`"),
        (_file(name="rank-00001.h5"), "names a file twice"),
        (_file(bytes=-1), "Expected `int` >= 0 - at `$.files[0].bytes`"),
        (_file(rest=None), "rest is None, expected a checksum"),
        (_file(rest="0" * 15), "expected a checksum of 16 digits"),
        (_file(rest="g" * 16), "expected a checksum of 16 digits"),
        (_tensor(axes=["dp"]), "axes is ['dp']; expected 2 names"),
        (_tensor(axes=["dp", 1]), "Expected `str | null`, got `int` - at `$.axes[1]`"),
        (_tensor(axes="dp"), "Expected `array | null`, got `str` - at `$.axes`"),
        (_file(bytes=2100), "beyond its 2100 bytes"),
        (_file(datasets={"float32": [2048, 1 << 61]}), "beyond its 4096 bytes"),
        (_file(datasets={"float32": [0, 40], "int8": [32, 1]}), "overlaps"),
        (_file(datasets={"object": [0, 1]}), "dtype 'object' is unknown"),
        (_file(datasets={"float32": [0.5, 1]}), "Expected `int`, got `float` - at `$.files[0].datasets[...][0]`"),
        (_tensor(name="a//b"), "no path of groups"),
        (_tensor(name="opt/s"), "appears twice"),
        (_tensor(name="opt"), "is a tensor and also the group"),
        (_tensor(name="\x1b[2J"), "control character"),
        (_tensor(dtype="float128"), "dtype 'float128' is unknown"),
        (_tensor(dtype="int64"), "beyond its dataset"),
        (_tensor(shape=[3, -2]), "Expected `int` >= 0 - at `$.shape[1]`"),
        (_tensor(shape=[3, 2.5]), "Expected `int`, got `float` - at `$.shape[1]`"),
        (_tensor(shape=[1] * 33), "Expected `array` of length <= 32 - at `$.shape`"),
        (_tensor(shape=[4, 2]), "no rank holds element (3, 0)"),
        (_tensor(shape=[1 << 40, 1 << 20]), "no rank holds element"),
        (_tensor(shape=[2, 2]), "does not lie inside"),
        (_tensor(blocks=[]), "no rank holds element (0, 0)"),
        (_block(file=2), "in file 2 of 2"),
        (_block(start=30), "beyond its dataset"),
        (_block(start=-1), "Expected `int` >= 0 - at `$.blocks[0].start`"),
        (_block(offset=[0]), "does not lie inside"),
        (_block(offset=[1, 0]), "overlap"),
        (_block(shape=[0, 2]), "is empty"),
        (_block(xxh3="00"), "has checksums of the wrong number or length"),
        (_block(xxh3="x" * 16), "or a value that is no checksum"),
        (lambda header, meta, tensors: tensors[0].pop("blocks"), "missing required field `blocks`"),
        (
            lambda header, meta, tensors: tensors[0]["blocks"].append(7),
            "Expected `object`, got `int` - at `$.blocks[2]`",
        ),
    ],
)
def test_hostile_manifests_are_refused(edit, message):
    with pytest.raises(CheckpointError) as caught:
        decode(forge(edit))
    assert message in str(caught.value)


def test_tensors_that_share_bytes_are_refused():
    # otherwise a small file could pose as any number of tensors of its size
    def edit(header, meta, tensors):
        tensors[0]["blocks"][1].update(file=0, start=17)

    with pytest.raises(CheckpointError, match=r"share bytes of rank-00000\.h5"):
        decode(forge(edit))


def test_deep_json_is_refused():
    body = b"[" * 200_000
    with pytest.raises(CheckpointError):
        decode(body + b"\n{}\n{}\n{}\n")


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", ".", "a/../b", "a\0", "a\nb", "\ud800", 3, None])
def test_bad_names(name):
    assert name_error(name)


@pytest.mark.parametrize("name", ["a", "model/blocks.0.attn.qkv.weight", "größe/第一", "a b", "..a", "x/%b"])
def test_good_names(name):
    assert name_error(name) is None


def test_a_name_cannot_be_tensor_and_group():
    assert nesting_error(["a/b", "a.b", "ab"]) is None
    assert "'a' is a tensor and also the group of 'a/b/c'" in nesting_error(["a", "a/b/c"])


def test_meta_is_json_or_refused():
    assert json.loads(encode_meta({"a": (1, 2.5, None, True), "b": {"c": "ü"}})) == {
        "a": [1, 2.5, None, True],
        "b": {"c": "ü"},
    }
    with pytest.raises(TypeError, match=r"meta\['a'\] has the key 1"):
        encode_meta({"a": {1: 2}})
    with pytest.raises(TypeError, match=r"meta\['a'\]\[1\] is a ndarray"):
        encode_meta({"a": [0, np.zeros(2)]})
    with pytest.raises(TypeError, match="meta is a list"):
        encode_meta([])


def nested(depth):
    value = 1
    for _ in range(depth - 1):
        value = [value]
    return {"a": value}


def test_meta_is_nested_as_deeply_as_can_be_read():
    deep = Manifest((), {}, nested(400))
    assert decode(encode(deep)).meta == deep.meta
    cycle = {"a": {}}
    cycle["a"]["b"] = [cycle]
    for meta in (nested(401), nested(2000), nested(100_000), cycle):
        with pytest.raises(ValueError, match=r"meta\['a'\]\[.*\.\.\. is nested more than 400 deep, or holds itself"):
            encode_meta(meta)


def test_links_and_pipes_instead_of_files_are_refused(tmp_path):
    path = ckpt.save(tmp_path / "a", {"x": np.arange(10)}, comm=None)
    file = path / "rank-00000.h5"
    file.rename(tmp_path / "elsewhere.h5")
    file.symlink_to(tmp_path / "elsewhere.h5")
    with pytest.raises(CheckpointError, match=r"rank-00000\.h5 is no regular file"):
        ckpt.open(path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"rank-00000\.h5 is no regular file"):
        ckpt.open(path)
    (path / "manifest.jsonl").rename(tmp_path / "manifest")
    os.mkfifo(path / "manifest.jsonl")
    with pytest.raises(CheckpointError, match=r"manifest\.jsonl is a pipe; expected a regular file"):
        ckpt.open(path)
    assert ckpt.latest(tmp_path) is None


TEXTS = st.lists(st.text("ab*?[]!/", min_size=1, max_size=6), min_size=1, max_size=6)


@given(names=TEXTS, patterns=TEXTS)
def test_patterns_match_as_fnmatch_does_and_names_themselves(names, patterns):
    def fit(name, pattern):
        return name == pattern or fnmatchcase(name, pattern)

    assert named(names, patterns) == [name for name in names if any(fit(name, pattern) for pattern in patterns)]
    problem = unmatched_error(names, patterns)
    idle = [pattern for pattern in patterns if not any(fit(name, pattern) for name in names)]
    assert problem is None if not idle else problem.startswith(f"no tensor's name matches {idle[0]!r}; ")
