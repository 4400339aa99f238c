"""Predicted memory: what can be counted by hand, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain.job.config import parse
from mpitrain.tensor.node_arrays import ArraySizes
from mpitrain.tools.plan.memory.prediction import KINDS, Prediction, predict

SMALL = ["--model.width", "64", "--model.layers", "4", "--model.heads", "2", "--train.batch", "16"]


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    (tmp_path / "text").write_bytes(b"some words " * 1000)
    return ["--data.path", str(tmp_path / "text")]


def predicted(text: list[str], *settings: str, np: int = 4, nodes: int = 1) -> Prediction:
    return predict(parse([*SMALL, *text, *settings]), np, nodes)


@pytest.mark.rest
def test_parameters_that_are_encoded_between_nodes_have_masters(text: list[str]) -> None:
    encoded = ["--parallel.wire-weights", "int8"]
    over_nodes = predicted(text, *encoded, nodes=2)
    assert over_nodes.rank["parameters"] == pytest.approx(over_nodes.num_parameters, rel=0.01)  # 4 bytes of each fourth
    assert predicted(text, *encoded).rank["parameters"] == 0
    assert predicted(text, *encoded, "--parallel.copies", "2", nodes=2).rank["parameters"] == 0  # no node gathers


@pytest.mark.rest
@pytest.mark.parametrize(
    ("settings", "storage", "full", "shards"),
    [
        ([], "resident", 4, 0),  # bytes a parameter on the node; shards are rows of the full ones
        (["--parallel.param-dtype", "bfloat16"], "resident", 2, 4),
        (["--parallel.copies", "2"], "resident", 8, 0),
        (["--parallel.stage", "0"], "kept", 16, 0),
        (["--parallel.stage", "2", "--parallel.storage", "private"], "kept", 16, 0),
        (
            ["--parallel.stage", "1", "--parallel.storage", "private", "--parallel.param-dtype", "bfloat16"],
            "kept",
            8,
            4,
        ),
    ],
)
def test_what_lasts_is_counted(text: list[str], settings: list[str], storage: str, full: int, shards: int) -> None:
    p = predicted(text, *settings)
    copies = 4 if settings[:2] == ["--parallel.stage", "0"] else 2 if "--parallel.copies" in settings else 1
    # Cuts between rows and gaps for alignment: a percent of so small a model.
    approx = {"parameters": shards, "full parameters": full, "optimizer": 8 * copies}
    for kind, each in approx.items():
        assert p.node[kind] == pytest.approx(each * p.num_parameters, rel=0.01), kind
    assert p.storage == storage
    assert set(p.rank) == set(p.node) == set(KINDS)


@pytest.mark.rest
@pytest.mark.parametrize(("nodes", "num_copies"), [(1, 2), (2, 6)])
def test_copies_of_an_elastic_run_are_counted(text: list[str], nodes: int, num_copies: int) -> None:
    p = predicted(text, "--train.elastic", "true", nodes=nodes)
    state_bytes = 12 * p.num_parameters / nodes  # fp32 parameters and two moments
    assert p.node["copies"] == pytest.approx(num_copies * state_bytes, rel=0.01)
    assert predicted(text, "--train.elastic", "true", "--train.copy-every", "0").node["copies"] == 0


def test_gathered_parameters_are_the_rest_and_one_block(text: list[str]) -> None:
    private = ["--parallel.storage", "private"]
    p = predicted(text, *private)
    width = 64
    block = 12 * width**2 + 13 * width
    rest = p.num_parameters - 4 * block
    assert p.storage == "gathered"
    assert p.rank["full parameters"] in (4 * rest, 4 * (rest + block))  # the most may be held between blocks
    kept = predicted(text, *private, "--parallel.no-reshard-after-forward")
    assert kept.rank["full parameters"] == 4 * p.num_parameters
    assert p.rank["gradient buffers"] == pytest.approx(2 * 4 * max(block, rest), rel=0.01)


@pytest.mark.rest
def test_activations_follow_the_micro_batch(text: list[str]) -> None:
    no_evaluation = ["--train.eval-batches", "0"]
    one, two = predicted(text, *no_evaluation), predicted(text, *no_evaluation, "--train.accumulate", "2")
    assert one.rank["activations"] == pytest.approx(2 * two.rank["activations"], rel=0.05)
    bf16 = predicted(text, *no_evaluation, "--parallel.param-dtype", "bfloat16")
    assert 0.4 < bf16.rank["activations"] / one.rank["activations"] < 0.7
    fp16 = predicted(text, *no_evaluation, "--parallel.param-dtype", "float16")
    assert fp16.rank["activations"] == pytest.approx(bf16.rank["activations"], rel=0.01)


@pytest.mark.rest
def test_checkpointed_blocks_keep_their_inputs(text: list[str]) -> None:
    settings = ["--train.eval-batches", "0", "--model.layers"]
    again = ["--parallel.checkpoint-activations"]

    def activations(layers: int, *more: str) -> int:
        return predicted(text, *settings, str(layers), *more).rank["activations"]

    stream = 4 * 128 * 64 * 4  # bytes: 4 sequences of 128 tokens, fp32
    assert activations(12, *again) - activations(4, *again) == pytest.approx(8 * stream, rel=0.01)
    assert activations(12) - activations(4) > 8 * 12 * stream
    saved = activations(12) - activations(12, *again, "attention")
    assert 12 * 4 * stream < saved < 12 * 7 * stream  # query, key, value, the result twice, and its sums
    again += ["block", "--parallel.tensor", "2", "--parallel.sequence", "false"]  # and so on 2 data ranks
    assert activations(12, *again) - activations(4, *again) == pytest.approx(8 * 2 * stream, rel=0.01)
    again += ["--parallel.partition-activations"]
    assert activations(12, *again) - activations(4, *again) == pytest.approx(8 * stream, rel=0.01)


@pytest.mark.rest
def test_tensor_ranks_hold_parts(text: list[str]) -> None:
    whole, cut = predicted(text, np=2), predicted(text, "--parallel.tensor", "2", np=4)
    width, layers = 64, 4
    # positions, norms, and the biases behind the sums
    uncut = 128 * width + (4 * layers + 2) * width + 2 * layers * width
    assert cut.num_parameters == whole.num_parameters
    for kind, each in {"full parameters": 4, "optimizer": 8}.items():
        assert cut.node[kind] == pytest.approx(each * (cut.num_parameters + uncut), rel=0.02), kind
    assert cut.rank["gradient buffers"] == pytest.approx(whole.rank["gradient buffers"] / 2, rel=0.1)
    alone = predicted(text, "--parallel.tensor", "2", np=2)
    assert alone.rank["gradient buffers"] == 0  # nothing is reduced over data ranks
    apart = predicted(text, "--parallel.tensor", "2", np=4, nodes=2)  # each node has the ranks of one data rank
    assert apart.rank["full parameters"] == pytest.approx(2 * cut.rank["full parameters"], rel=1e-3)


@pytest.mark.rest
def test_activations_of_tensor_ranks(text: list[str]) -> None:
    """Of a micro-batch: half of one rank's with two ranks and their own tokens, more with whole tokens."""

    def of_layers(*settings: str, np: int, nodes: int = 1) -> tuple[float, float]:
        """What 8 layers more keep: a rank's own, and its share of what ranks share."""
        first, second = (
            predicted(text, "--train.eval-batches", "0", *settings, "--model.layers", layers, np=np, nodes=nodes).rank
            for layers in ("4", "12")
        )
        own, shared = (second[kind] - first[kind] for kind in ("activations", "shared activations"))
        return own, shared

    tensor = ["--parallel.tensor", "2"]
    whole, none = of_layers(np=2)
    own, shared = of_layers(*tensor, np=4)
    assert none == 0
    assert own + shared == pytest.approx(whole / 2, rel=0.02)
    stream = 8 * 128 * 64 * 4  # bytes: 8 sequences of 128 tokens, fp32
    assert shared == pytest.approx(8 * 2 * stream / 2, rel=0.05)  # of each layer the inputs of its two regions
    whole_tokens, little = of_layers(*tensor, "--parallel.sequence", "false", np=4)
    assert little < 0.1 * stream
    assert own + shared < 0.8 * whole_tokens < 0.8 * whole
    # On different nodes each rank has the inputs of regions for itself.
    alone, nothing = of_layers(*tensor, np=4, nodes=4)
    assert nothing == 0 and alone - own == pytest.approx(8 * 2 * stream, rel=0.05)


@pytest.mark.rest
def test_an_odd_number_of_heads_makes_ranks_differ(text: list[str]) -> None:
    odd = predicted(text, "--parallel.tensor", "2", "--model.heads", "3", "--model.width", "96", np=2)
    assert odd.rank["optimizer"] > 1.02 * odd.node["optimizer"] / 2
    assert odd.rank["shared activations"] == odd.node["shared activations"] // 2
    assert odd.shared > odd.node["shared activations"] + odd.node["full parameters"]


def test_nodes_share_what_lies_in_their_memory(text: list[str]) -> None:
    one, two = predicted(text, np=8), predicted(text, np=8, nodes=2)
    assert one.node["full parameters"] == pytest.approx(two.node["full parameters"], rel=1e-4)
    assert two.rank["full parameters"] == pytest.approx(2 * one.rank["full parameters"], rel=1e-4)
    assert two.node["optimizer"] == pytest.approx(one.node["optimizer"] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "memory: --np N, the number of ranks, is missing"),
        (["--np"], "memory: --np: expected a whole number of at least 1, got nothing"),
        (["--np", "0"], "memory: --np: expected a whole number of at least 1, got 0"),
        (["--np=3", "--nodes=2"], "memory: 3 ranks cannot be spread evenly over 2 nodes"),
        (
            ["--np", "5", "--train.batch", "12"],
            "train.batch: expected a multiple of 5 = 5 ranks x 1 (train.accumulate), got 12",
        ),
        (["--np", "2", "--model.siz", "xl"], "unknown setting --model.siz: did you mean --model.size?"),
        (["--np", "2", "--parallel.device", "cuda"], "memory: no prediction for GPUs yet"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    from mpitrain.cli import main

    assert main(["memory", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"mpitrain: error: {error}") and err.count("\n") == 1


@pytest.mark.rest
def test_a_default_batch_is_rounded_up_to_what_the_ranks_divide(
    text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mpitrain.cli import main

    def batch(*words: str) -> int:
        assert main(["memory", "--np", "8", "--nodes", "2", "--json", *text, *words]) == 0
        return int(json.loads(capsys.readouterr().out)["batch"])

    assert batch() == 16
    assert batch("--train.accumulate", "3") == 24
    assert batch("--train.batch", "8") == 8
    assert main(["memory", "--np", "8", *text]) == 0
    assert "a step of 16 sequences, rounded up from the default" in " ".join(capsys.readouterr().out.split())
    settings = tmp_path / "settings.toml"
    settings.write_text("[train]\nbatch = 12\n")
    assert main(["memory", "--np", "8", "--config", str(settings), *text]) == 1
    assert "train.batch: expected a multiple of 8" in capsys.readouterr().err


def test_help_shows_its_own_flags_and_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    from mpitrain.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["memory", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    for flag in ("--np N ", "--nodes M ", "--json ", "--model.size", "--train.batch"):
        assert flag in out


def test_the_command_starts_no_mpi(text: list[str]) -> None:
    script = (
        "import sys; from mpitrain.cli import main; assert main(sys.argv[1:]) == 0; print('mpi4py.MPI' in sys.modules)"
    )
    command = [sys.executable, "-c", script, "memory", "--np", "2", "--parallel.tensor", "2", *text]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.endswith("False\n"), result.stderr
    assert "1.4 M parameters, resident, 2 ranks on 1 node" in result.stdout


def test_the_next_shared_array() -> None:
    """The smallest free array that fits; a new one takes the place of the largest free one. Prediction and run have this one rule."""
    sizes = ArraySizes()
    for nbytes in (100_000, 5_000, 20_000):
        choice = sizes.choose(nbytes, np.zeros(sizes.count, np.bool_))
        assert (
            choice is not None and choice.number == sizes.count and nbytes <= choice.new_bytes <= 1.25 * nbytes + 4096
        )
        sizes.change(choice)
    assert sizes.choose(4_000, np.array([True, True, True])) == (1, 0)
    assert sizes.choose(6_000, np.array([True, False, True])) == (2, 0)
    larger = sizes.choose(30_000, np.array([False, True, True]))
    assert larger is not None and larger.number == 2 and larger.new_bytes >= 30_000
    sizes.change(larger)
    assert sizes.count == 3 and sizes.choose(30_000, np.array([False, True, True])) == (2, 0)
