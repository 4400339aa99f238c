"""Settings: defaults < file < flags, exact round trips, and one clear line for every mistake."""

from __future__ import annotations

import base64
import random
import subprocess
import sys
import zlib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.manifest import encode_meta
from mpitrain import files
from mpitrain.job.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    check_ranks,
    differences,
    from_text,
    from_toml,
    packed_settings,
    packing,
    parse,
    to_toml,
    unpacked_settings,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def test_no_arguments_give_the_defaults() -> None:
    assert parse([]) == Config()


def test_flags_go_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('run = "elsewhere"\n[train]\nsteps = 7\nbatch = 4\n[optim]\nlr = 1\n')
    defaults = replace(Config(), train=TrainConfig(steps=1, seed=9))
    config = parse(["--train.batch", "6", "--config", str(file)], defaults)
    assert config.run == "elsewhere"
    assert config.train == TrainConfig(steps=7, batch=6, seed=9)
    assert config.optim.lr == 1.0 and type(config.optim.lr) is float


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--train.eval-only"], replace(Config(), train=TrainConfig(eval_only=True))),
        (["--train.eval_only"], replace(Config(), train=TrainConfig(eval_only=True))),
        (["--train.eval-only", "false"], Config()),
        (["--train.eval-only", "--train.no-eval-only"], Config()),
        (["--model.no-tied"], replace(Config(), model=ModelConfig(tied=False))),
        (["--model.tied"], replace(Config(), model=ModelConfig(tied=True))),
        (["--model.tied", "false", "--model.tied", "none"], Config()),
        (["--model.family", "llama"], replace(Config(), model=ModelConfig(family="llama"))),
        (["--model.kv-heads", "3"], replace(Config(), model=ModelConfig(kv_heads=3))),
        (["--train.steps", "3", "--train.steps=4"], replace(Config(), train=TrainConfig(steps=4))),
        (["--data.path", "a", "b c", "--run=x"], replace(Config(), run="x", data=DataConfig(path=("a", "b c")))),
        (["--data.path"], Config()),
        (["--optim.betas", "0.8", "0.9"], replace(Config(), optim=OptimConfig(betas=(0.8, 0.9)))),
        (["--model.width", "60", "--model.heads", "6"], replace(Config(), model=ModelConfig(width=60, heads=6))),
        (["--model.width", "60", "--model.width", "none"], Config()),
        (["--parallel.stage", "2"], replace(Config(), parallel=ParallelConfig(stage=2))),
        *(
            (
                ["--parallel.checkpoint-activations", *words],
                replace(Config(), parallel=ParallelConfig(checkpoint_activations=what)),
            )
            for words, what in [
                (["attention"], "attention"),
                (["block"], "block"),
                ([], "block"),  # as a bool, which it was in version 0.1
                (["true"], "block"),
                (["false"], "none"),
                (["block", "--parallel.no-checkpoint-activations"], "none"),
            ]
        ),
        (["--model", "small"], replace(Config(), model=ModelConfig(size="small"))),
        (["--model=xl", "--model.width", "800"], replace(Config(), model=ModelConfig(size="xl", width=800))),
        (["--run", "-x"], replace(Config(), run="-x")),
        (["--train.sample-prompt=--x=1"], replace(Config(), train=TrainConfig(sample_prompt="--x=1"))),
    ],
)
def test_forms_of_flags(argv: list[str], expected: Config) -> None:
    assert parse(argv) == expected


@pytest.mark.rest
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train.step", "3"], "unknown setting --train.step: did you mean --train.steps?"),
        (["--lr", "3"], "unknown setting --lr: did you mean --optim.lr?"),
        (["--optim.steps", "3"], "unknown setting --optim.steps: did you mean --train.steps?"),
        (["--train.eval-evry", "3"], "unknown setting --train.eval-evry: did you mean --train.eval-every?"),
        (["--conf", "x"], "unknown setting --conf: did you mean --config?"),
        (["--qqqqq"], "unknown setting --qqqqq: --help shows all settings"),
        (
            ["--log"],
            "unknown setting --log: log is a section; its settings are --log.every, --log.layers-every, "
            "--log.modules, --log.on-event, --log.project, --log.sinks, --log.trace-steps",
        ),
        (["--model", "smal"], "model.size: expected one of tiny, small, medium, large, xl, got 'smal'"),
        (["train"], "unexpected 'train': settings are given as --section.name value"),
        (["--train.steps"], "--train.steps: expected a whole number after it, got nothing"),
        (["--train.steps", "ten"], "--train.steps: expected a whole number, got 'ten'"),
        (["--optim.lr", "x"], "--optim.lr: expected a number or none, got 'x'"),
        (["--optim.betas", "0.9"], "--optim.betas: expected 2 values, each a number, got [0.9]"),
        (["--parallel.device", "gpu"], "--parallel.device: expected one of auto, cpu, cuda, got 'gpu'"),
        (
            ["--parallel.checkpoint-activations", "1"],
            "--parallel.checkpoint-activations: expected one of none, block, attention, got '1'",
        ),
        (
            ["--parallel.partition-activations"],
            "parallel.partition_activations: needs parallel.checkpoint_activations; choose block or attention",
        ),
        (
            ["--parallel.offload-activations"],
            "parallel.offload_activations: needs parallel.checkpoint_activations; choose block or attention",
        ),
        (["--parallel.compress", "topk"], "--parallel.compress: expected one of none, top_k, power_sgd, got 'topk'"),
        (
            ["--parallel.compress", "power_sgd"],
            "parallel.compress: power_sgd needs whole matrices, and stage 3 cuts them; choose --parallel.stage 0, or several "
            "--parallel.copies",
        ),
        (
            ["--parallel.compress-share", "0.5"],
            "parallel.compress_share: expected at least 1e-06 and less than 0.5, got 0.5",
        ),
        (
            ["--parallel.compress-rank", "2"],
            "parallel.compress_rank: nothing uses it here; it needs parallel.compress power_sgd",
        ),
        (
            ["--parallel.no-compress-feedback"],
            "parallel.compress_feedback: nothing uses it here; it needs parallel.compress top_k or power_sgd",
        ),
        (
            ["--parallel.exact-steps", "50"],
            "parallel.exact_steps: nothing uses it here; it needs parallel.compress top_k or power_sgd, or parallel.local_steps",
        ),
        (
            ["--parallel.local-steps", "10", "--parallel.outer", "mean", "--parallel.outer-momentum", "0.3"],
            "parallel.outer_momentum: nothing uses it here; it needs parallel.local_steps with parallel.outer nesterov",
        ),
        (
            ["--parallel.stage", "0", "--parallel.wire-weights", "int8"],
            "parallel.wire_weights: in stage 0 each rank has all parameters, and sends none; choose fp32, or stage 1 to 3",
        ),
        (["--parallel.stage", "4"], "--parallel.stage: expected one of 0, 1, 2, 3, got 4"),
        (["--parallel.stage", "x"], "--parallel.stage: expected one of 0, 1, 2, 3, got 'x'"),
        (
            ["--parallel.stage", "0", "--parallel.storage", "resident"],
            "parallel.storage: in stage 0 each rank has its own copy; choose auto, or stage 1 to 3",
        ),
        (["--train.eval-only=maybe"], "--train.eval-only: expected true or false, got 'maybe'"),
        (["--train.eval-only", "none"], "unexpected 'none': settings are given as --section.name value"),
        (["--model.family", "lama"], "--model.family: expected one of gpt, llama, got 'lama'"),
        (["--model.kv-head", "1"], "unknown setting --model.kv-head: did you mean --model.kv-heads?"),
        (["--model.kv-heads", "0", "--model.family", "llama"], "model.kv_heads: expected at least 1, got 0"),
        (
            ["--model.kv-heads", "1"],
            "model.kv_heads: a GPT has as many key and value heads as heads, expected 3 or no number, got 1; "
            "choose --model.family llama for grouped queries",
        ),
        (["--train.no-eval-only=true"], "--train.no-eval-only: expected no value, got 'true'"),
        (["--train.no-eval-only", "true"], "unexpected 'true': settings are given as --section.name value"),
        (["--train.steps", "0"], "train.steps: expected at least 1, got 0"),
        (["--train.max-rewinds", "-1"], "train.max_rewinds: expected at least 0, got -1"),
        (["--train.spike-threshold", "inf"], "train.spike_threshold: expected at least 0, got inf"),
        (["--optim.lr", "nan"], "optim.lr: expected at least 0, got nan"),
        (["--optim.name", "adam"], "--optim.name: expected one of adamw, muon, lamb, lars, sgd, got 'adam'"),
        (["--optim.schedule", "cos"], "--optim.schedule: expected one of cosine, linear, wsd, constant, got 'cos'"),
        (["--optim.layer-decay", "0"], "optim.layer_decay: expected above 0 and at most 1, got 0.0"),
        (
            ["--optim.schedule", "wsd", "--optim.decay-ratio", "1.5"],
            "optim.decay_ratio: expected above 0 and at most 1, got 1.5",
        ),
        (
            ["--optim.decay-ratio", "0.1"],
            "optim.decay_ratio: the schedule cosine has none; choose --optim.schedule wsd",
        ),
        (["--optim.lr-scaling", "sqrt"], "optim.lr_scaling: needs optim.base_batch; set both, or none of them"),
        (["--optim.base-batch", "8"], "optim.base_batch: needs optim.lr_scaling; set both, or none of them"),
        (
            ["--optim.momentum", "0.9"],
            "optim.momentum: the optimizer adamw has none; choose --optim.name muon or lars or sgd",
        ),
        (
            ["--optim.name", "lamb", "--optim.matrix-lr", "0.1"],
            "optim.matrix_lr: the optimizer lamb has none; choose --optim.name muon",
        ),
        (["--optim.ns-dtype", "float32"], "optim.ns_dtype: the optimizer adamw has none; choose --optim.name muon"),
        (
            ["--optim.name", "muon", "--optim.matrix-lr", "0.1", "--optim.lr", "0"],
            "optim.matrix_lr: expected optim.lr above 0, of which it is a multiple, got 0",
        ),
        (["--data.heldout", "1"], "data.heldout: expected at least 0 and less than 1, got 1.0"),
        (["--model.size", "smal"], "model.size: expected one of tiny, small, medium, large, xl, got 'smal'"),
        (
            ["--model.width", "100", "--model.heads", "6"],
            "model.width: expected a multiple of model.heads = 6, got 100; nearest: 96 or 102",
        ),
        (["--model.vocab", "100"], "model.vocab: expected at least 256, because tokens are bytes, got 100"),
        (["--config", "/nowhere.toml"], "settings file /nowhere.toml: No such file or directory"),
        (["--run", "\udcff"], "--run: expected text in UTF-8, which a TOML file can hold, got '\\udcff'"),
    ],
)
def test_mistakes_in_flags(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert str(caught.value) == message


@pytest.mark.parametrize(("before", "now"), [("false", "none"), ("true", "block"), ('"attention"', "attention")])
def test_a_file_of_an_earlier_version(tmp_path: Path, before: str, now: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[parallel]\ncheckpoint_activations = {before}\n")
    assert from_toml(file).parallel.checkpoint_activations == now


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstep = 3", "unknown setting train.step in FILE: did you mean train.steps?"),
        ("[trian]\nsteps = 3", "unknown section [trian] in FILE: did you mean [train]?"),
        ("steps = 3", "unknown setting steps in FILE: did you mean train.steps?"),
        ("train = 3", "train in FILE: expected a section [train], got 3"),
        ("[run]\nx = 3", "run in FILE: expected text, got {'x': 3}"),
        ("[train]\nsteps = 1.0", "train.steps in FILE: expected a whole number, got 1.0"),
        ("[train]\nsteps = true", "train.steps in FILE: expected a whole number, got True"),
        (
            "[parallel]\ncheckpoint_activations = 1",
            "parallel.checkpoint_activations in FILE: expected one of none, block, attention, got 1",
        ),
        ("[parallel]\nstage = true", "parallel.stage in FILE: expected one of 0, 1, 2, 3, got True"),
        ("[optim]\nlr = true", "optim.lr in FILE: expected a number or none, got True"),
        ("[data]\npath = 'a'", "data.path in FILE: expected any number of values, each text, got 'a'"),
        ("[data]\npath = [1]", "data.path in FILE: expected text, got 1"),
        ("[train", "settings file FILE is not valid TOML: "),
    ],
)
def test_mistakes_in_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        from_toml(file)
    assert str(caught.value).replace(str(file), "FILE").startswith(message)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_no_valid_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b'run = "\xff"')
    with pytest.raises(ConfigError, match="is not valid TOML"):
        from_toml(file)


def test_toml_round_trip_of_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(Config()))
    again = from_toml(file)
    assert again == parse(["--config", str(file)]) == replace(Config(), optim=OptimConfig(lr=3e-3, weight_decay=0.1))
    assert differences(Config(), again) == []


@pytest.mark.rest
@settings(deadline=None)
@given(
    run=TEXT,
    prompt=TEXT,
    path=st.lists(TEXT, max_size=3).map(tuple),
    lr=st.floats(min_value=0, allow_infinity=False),
    width=st.none() | st.integers(1, 2**40).map(lambda n: 12 * n),
    tied=st.none() | st.booleans(),
    family=st.sampled_from(["gpt", "llama"]),
)
def test_toml_round_trip_is_exact(
    tmp_path_factory: pytest.TempPathFactory,
    run: str,
    prompt: str,
    path: tuple[str, ...],
    lr: float,
    width: int | None,
    tied: bool | None,
    family: Literal["gpt", "llama"],
) -> None:
    config = Config(
        run=run,
        model=ModelConfig(family=family, width=width, heads=6, tied=tied),
        data=DataConfig(path=path),
        optim=OptimConfig(lr=lr, weight_decay=0.2),
        train=TrainConfig(sample_prompt=prompt),
    )
    file = tmp_path_factory.getbasetemp() / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    again = from_toml(file)
    assert again == config
    assert differences(config, again) == []


def test_differences() -> None:
    other = parse(["--optim.lr", "0.5", "--model.width", "60", "--data.path", "a"])
    width = Config().model.width
    assert width is None
    assert differences(Config(), other) == [
        "model.width: none -> 60",
        'data.path: [] -> ["a"]',
        "optim.lr: 0.003 -> 0.5",
    ]


@pytest.mark.parametrize(
    ("name", "lr", "weight_decay"),
    [("adamw", 3e-3, 0.1), ("muon", 3e-3, 0.1), ("lamb", 1e-2, 0.1), ("lars", 3.0, 1e-4), ("sgd", 0.3, 1e-4)],
)
def test_each_optimizer_has_its_own_rate_and_decay(tmp_path: Path, name: str, lr: float, weight_decay: float) -> None:
    assert parse(["--optim.name", name]).optim.resolve() == (lr, weight_decay)
    given = parse(["--optim.name", name, "--optim.lr", "0", "--optim.weight-decay", "0.2"])
    assert given.optim.resolve() == (0, 0.2)
    file = tmp_path / "config.toml"
    file.write_text(f'[optim]\nname = "{name}"\n')
    assert parse(["--config", str(file), "--optim.name", "adamw"]).optim.resolve() == (3e-3, 0.1)
    file.write_text(to_toml(given))
    assert from_toml(file) == given


def test_check_ranks_names_the_factors_and_the_nearest_that_fit() -> None:
    config = parse(["--train.batch", "16", "--train.accumulate", "2"])
    check_ranks(config, 4)
    check_ranks(parse(["--checkpoint.files", "8"]), 4)  # a run of 8 ranks that goes on on 4
    with pytest.raises(ConfigError) as caught:
        check_ranks(config, 3)
    assert str(caught.value) == (
        "train.batch: expected a multiple of 6 = 3 ranks x 2 (train.accumulate), got 16; nearest multiples: 12 or 18"
    )
    with pytest.raises(ConfigError, match=r"got 16; nearest multiples: 40$"):
        check_ranks(config, 20)
    with pytest.raises(ConfigError, match=r"parallel.copies: 4 ranks do not make 3 copies; take a divisor of 4"):
        check_ranks(parse(["--parallel.copies", "3"]), 4)


def test_check_ranks_knows_the_heads_that_tensor_parallelism_shares() -> None:
    def check(num_ranks: int, *settings: str) -> None:
        check_ranks(parse(["--parallel.tensor", str(num_ranks), "--parallel.no-sequence", *settings]), num_ranks)

    llama = ["--model.family", "llama", "--model.heads", "12"]
    check(2)  # one rank has one head of the GPT, the other two
    check(5, *llama)
    for num_ranks, kv_heads in ((2, 1), (2, 4), (4, 4), (6, 3), (12, 1)):
        check(num_ranks, *llama, "--model.kv-heads", str(kv_heads))
    with pytest.raises(ConfigError, match=r"parallel.tensor: 4 ranks cannot share 3 heads \(model.heads\)$"):
        check(4)
    with pytest.raises(
        ConfigError, match=r"5 ranks cannot share 12 heads .* equally, which .* \(model.kv_heads = 4\) need"
    ):
        check(5, *llama, "--model.kv-heads", "4")
    with pytest.raises(
        ConfigError, match=r"parallel.tensor: 4 ranks cannot share 6 key and value heads \(model.kv_heads\) equally"
    ):
        check(4, *llama, "--model.kv-heads", "6")


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for top in fields(Config):
        value = getattr(Config(), top.name)
        names = [f"{top.name}.{f.name}" for f in fields(value)] if is_dataclass(value) else [top.name]
        for name in names:
            assert f"--{name.replace('_', '-')}" in shown


def test_importing_the_settings_loads_neither_torch_nor_mpi() -> None:
    code = "import sys, mpitrain.job.config; print([m for m in ('torch', 'mpi4py') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


SOURCES = """
[[data.sources]]
name = "web"
path = ["web-{000..127}.tar", "s3://b/*.jsonl"]
weight = 3

[[data.sources]]
name = "books"
path = ["books.parquet"]
field = "content"
weights = [[0, 1.0], [10, 2.5]]
"""


def test_sources_of_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(SOURCES)
    config = from_toml(file)
    web, books = config.data.sources
    assert (web.path, web.points) == (("web-{000..127}.tar", "s3://b/*.jsonl"), ((0, 3.0),))
    assert (books.field, books.points) == ("content", ((0.0, 1.0), (10.0, 2.5)))
    file.write_text(to_toml(config))
    assert from_toml(file).data == config.data


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "[[data.sources]]",
            '[data]\npath = ["a.tar"]\n[[data.sources]]',
            "data.path and data.sources: expected one of them",
        ),
        ('"books"', '"web"', r"data.sources: expected different names, got \['web', 'web'\]"),
        ('"books"', '"a/b"', "data.sources: expected a name without / and paths that are not empty"),
        ('"books.parquet"', '"books.bin"', r"data.sources: expected documents, got files of tokens \(books.bin\)"),
        ("weight = 3", "weight = -1", "data.sources: expected weights of at least 0"),
        ("[10, 2.5]", "[0, 2.5]", "data.sources: expected weights with growing steps"),
        ("weight = 3", "wait = 3", "data.sources in .*a.toml: unknown setting wait: did you mean weight?"),
    ],
)
def test_mistakes_in_sources(tmp_path: Path, before: str, after: str, message: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(SOURCES.replace(before, after, 1))
    with pytest.raises(ConfigError, match=message):
        from_toml(file)


def test_sources_are_not_for_flags() -> None:
    with pytest.raises(
        ConfigError, match=r"--data.sources: expected a table with name, path, .*, in a TOML file, got 'a.tar'"
    ):
        parse(["--data.sources", "a.tar"])


def test_long_settings_in_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of shards may be longer than a line of a manifest. A checkpoint of a stranger has nothing that grows without end."""
    monkeypatch.setattr(packing, "_MOST_PACKED", 600_000)
    monkeypatch.setattr(packing, "MOST_SETTINGS_BYTES", 3_000_000)
    long = "".join(f'"s3://bucket/{"d" * 80}/{number:08}", ' for number in range(10_000))
    for text in ("steps = 1\n", f"[data]\npath = [{long}]\n"):
        assert unpacked_settings(packed_settings(text)) == text
        assert len(packed_settings(text)) < 500_000
    other = random.Random(0).randbytes(1_000_000).hex()
    with pytest.raises(
        ConfigError, match=r"the settings have 2,000,000 bytes, .* expected at most .*give fewer shards"
    ):
        packed_settings(other)
    bomb = base64.b64encode(zlib.compress(bytes(6_000_000))).decode()
    for wrong in (bomb, bomb[:-8], "#", base64.b64encode(zlib.compress(b"\xff")).decode(), "é"):
        with pytest.raises(ConfigError, match="the settings in the checkpoint are damaged, or have more than"):
            unpacked_settings(f"zlib:{wrong}")


@pytest.mark.rest
@pytest.mark.parametrize("path", ["\u5b57" * 9_000, "\U0001f600" * 9_000, "s3://a" * 9_000, "a, b: [{,:" * 3_000])
@pytest.mark.parametrize("num_bytes", [250_000, 270_000, 2_500_000, 4_500_000])
def test_settings_fit_a_line_of_a_manifest(path: str, num_bytes: int) -> None:
    """In each script, and with the characters that its readers count."""
    text = to_toml(Config(data=DataConfig(path=(path,) * (num_bytes // len(path.encode())))))
    assert unpacked_settings(packed_settings(text)) == text
    encode_meta({"config": packed_settings(text), "num_ranks": 1})


@pytest.mark.parametrize(("num_paths", "is_accepted"), [(8_000, True), (9_900, False)])
def test_a_run_reads_its_own_settings_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_paths: int, is_accepted: bool
) -> None:
    """A file may be shorter than what is written of it: without the defaults, and without blanks."""
    monkeypatch.setattr(files, "_MOST_WORK", 20_000)
    monkeypatch.setattr(packing, "_LONG", 1_000)
    file = tmp_path / "a.toml"
    file.write_text("[data]\npath=[" + ",".join(f'"/d/{number:06}.tar"' for number in range(num_paths)) + "]\n")
    config = from_toml(file)
    if is_accepted:
        read = from_text(unpacked_settings(packed_settings(to_toml(config))), "a checkpoint")
        assert read.data == config.data and to_toml(read) == to_toml(config)
    else:
        with pytest.raises(ConfigError, match=r"cannot be read again: it is too long.*; give fewer shards"):
            packed_settings(to_toml(config))
