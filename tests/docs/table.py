"""What test_pages.py knows of single blocks: what is shortened, what is made before, and what does not run here, with the reason.

A key is the page and how a block or a command of it begins.
"""

import re
from typing import TypeVar

from pages import Block, Command

T = TypeVar("T")

TIMEOUT_S = 240.0  # of a command

SHELL = ("README.md: . .venv/bin/activate", "README.md: export PRTE")
"""What README.md says for all pages. A page that is read alone begins with it."""

SHORT = (
    "README.md: ",
    "docs/checkpoints.md: mpirun",
    "docs/checkpoints.md: cp",
    "docs/checkpoints.md: printf",
    "docs/checkpoints.md: python -m ckpt",
    "docs/plan.md: python -m mpitrain plan --model",
    "docs/plan.md: llama3",
)
"""What CI runs, by the page and how a block or a command begins."""

HOSTS = "needs hosts with an ssh server: tests/launch/mpitrain/test_supervisor.py has such hosts"
INSTALLS = "installs packages from a network: tests/launch/test_wheel.py installs a wheel"
PICTURE = "a picture"
SCRIPT = "needs a batch system: tests/launch/mpitrain/test_slurm.py runs the scripts of examples/slurm"
TESTS = "the tests themselves"
FAULT = "the report of a fault, which this test does not make: "
DEATHS = FAULT + "tests/launch/collectives/test_losses.py and tests/launch/collectives/test_diagnosis.py do"

S3 = "needs a bucket: tests/launch/mpitrain/test_remote_shards.py has a server of S3"
PACK = "packs gigabytes of packages: tests/launch/mpitrain/test_pack.py packs a small environment"

LEFT_OUT = {
    "README.md: mpirun -np N": "says the number of ranks as N",
    "README.md: ./mpirun/test": TESTS,
    "README.md: pip install": INSTALLS,
    "README.md: #!/bin/bash": SCRIPT,
    "docs/coming.md: pip install": INSTALLS,
    "docs/launching.md: cd /shared": HOSTS,
    "docs/launching.md: .venv/bin/mpirun -H node1": HOSTS,
    "docs/launching.md: #!/bin/bash": SCRIPT,
    "docs/launching.md: torch.cuda": "needs a GPU",
    "docs/sharding.md:  a unit, flat": PICTURE,
    "docs/sharding.md:                  forward of its module": PICTURE,
    "docs/parallel.md:                       data rank 0": PICTURE,
    "docs/parallel.md: rank = (((": "a formula: tests/mpi/collectives/test_communicator.py tests the order of the ranks",
    "docs/parallel.md:                            tp rank": PICTURE,
    "docs/parallel.md:                 ┌": PICTURE,
    "docs/parallel.md: afmoe": "a list, of which tests/mpi/tensor/test_transformers_plans.py tries each model",
    "docs/parallel-internals.md:                      without": PICTURE,
    "docs/pipelines.md: [rank 1] torch.OutOfMemoryError": FAULT + "tests/launch/mpitrain/test_pipeline_errors.py does",
    "docs/pipelines.md: afmoe": "a list, of which tests/mpi/stages/test_transformers.py tries each model",
    "docs/optimizers.md:    momentum, on": PICTURE,
    "docs/reproducibility.md: python -m mpitrain diff /runs/two": "compares checkpoints of a program of the reader's own",
    "docs/gpu.md: pip install": INSTALLS,
    "docs/gpu.md: NCCL    no": FAULT + "tests/unit/collectives/test_binding.py does",
    "docs/gpu.md: mpirun -np": "needs a GPU",
    "docs/gpu.md: python -m pytest -m gpu": "needs a GPU",
    "docs/data.md: pip install": INSTALLS,
    "docs/data.md: sha256sum": "makes a list for the next command",
    "docs/data.md: mpirun -np 4 python -m mpitrain --run runs/c4": S3,
    "docs/network-compression.md:  node 1": PICTURE,
    "docs/network-local-steps.md:  copy 0": PICTURE,
    "docs/collectives.md:                             before": PICTURE,
    "docs/collectives.md:                     dp_replicate 0": PICTURE,
    "docs/collectives-internals.md:   comm.all_reduce": PICTURE,
    "docs/checkpoints.md: step-00000007/": "a list of files with what each is for",
    "docs/checkpoints.md: >>> ckpt.look": "a forged checkpoint, which tests/unit/ckpt/test_hostile.py makes",
    "docs/faults.md: ./mpirun/elastic -H node1": HOSTS,
    "docs/faults.md: step 25/60": DEATHS,
    'docs/faults.md: {"event": "failure"': DEATHS,
    "docs/faults.md: 2026-": DEATHS,
    "docs/faults.md: tail -n 1 runs/rehearsal": "ends a rank of the run of the line above while it trains",
    'docs/faults.md: {"step":19': FAULT,
    "docs/detection.md: [rank": DEATHS,
    "docs/relaunch.md: python -m mpitrain elastic -- mpirun -H": HOSTS,
    "docs/relaunch.md: ./mpirun/elastic -H": HOSTS,
    "docs/doctor.md: MPI\n": FAULT + "tests/launch/mpitrain/test_doctor.py makes wrong installations",
    "docs/monitoring.md: metrics.jsonl": "lines of three files, cut short",
    "docs/silent-faults.md: step": FAULT
    + "tests/mpi/health/test_rewinds.py and tests/mpi/monitor/test_slow_ranks.py do",
    "docs/silent-faults.md: mpitrain: error": FAULT
    + "tests/mpi/health/test_desync.py and tests/mpi/health/test_flips.py do",
    "docs/doctor.md: mpirun -np 4 -H host1": HOSTS,
    "docs/doctor.md: srun": SCRIPT,
    "docs/monitoring-sinks.md: tensorboard --logdir": "serves pages until it is stopped",
    "docs/monitoring-sinks.md: mpirun -np 2 python -m mpitrain --run runs/alerts": "needs a mail server",
    "docs/admin.md: #!/bin/sh": "an epilog of Slurm, which tests/unit/test_epilog.py runs",
    "docs/admin.md: pip": INSTALLS,
    "docs/admin.md: python3 -m venv": INSTALLS,
    "docs/admin.md: env/bin/pip": INSTALLS,
    "docs/start.md: ./mpirun/pack": PACK,
    "docs/start.md: .venv/bin/python -m mpitrain bench calls --np 4 --below": "needs the pack",
    "docs/start.md: srun": SCRIPT,
    "docs/start.md: each_node": SCRIPT,
    "docs/start.md: trap": SCRIPT,
    "docs/start.md: $each_node": SCRIPT,
    "docs/start.md: mpirun -np 8": "needs the pack",
    "docs/architecture.md:    mpirun/setup": PICTURE,
    "CONTRIBUTING.md: ./mpirun/test": TESTS,
    "CONTRIBUTING.md: ( . mpirun/lib.sh": TESTS,
}

TRAINS = re.compile(
    r"^(mpirun(?: --with-ft ulfm| -np \d+)* python -m mpitrain(?= --)|./mpirun/train(?: -np \d+)?"
    r"|./mpirun/cluster run -H 2x2 -- python -m mpitrain(?= --))"
    r"(?!.*(?:--train.steps|eval-only))(.*?)(\s*#.*)?$",
    re.DOTALL,
)

SHORTER = [
    (
        "docs/network",
        re.compile(r"^mpirun -H node1:4,node2:4 -np 8 \$PWD/.venv/bin/python"),
        "./mpirun/cluster run -H 2x2 -- python",
    ),
    ("", TRAINS, r"\1\2 --train.steps 20\3"),
    ("", re.compile(r"(--train.steps) \d{3,}"), r"\1 20"),
    ("", re.compile(r"(--train.steps \d+)"), r"\1 --train.sample-bytes 20 --train.eval-batches 2"),
    ("", re.compile(r"(--checkpoint.every|--train.eval-every) 100"), r"\1 10"),
    ("", re.compile(r"(--model.vocab \d{5}.*--train.steps) 20"), r"\1 2"),
    ("docs/training.md", re.compile(r"(--model.size small)"), r"\1 --model.layers 1"),
    ("docs/training.md", re.compile(r"(mpitrain sample)"), r"\1 --bytes 20"),
    ("docs/tokenizers.md", re.compile(r"-np 16"), "-np 4"),
    ("docs/data.md", re.compile(r"(--model.size small)"), r"\1 --model.layers 1 --train.batch 4"),
    ("docs/batches.md", re.compile(r"\{000..127\}"), "{000..003}"),
    ("docs/batches.md", re.compile(r"batch=256"), "batch=8"),
    ("docs/batches.md", re.compile(r"in data:"), "in itertools.islice(data, 4):"),
    ("docs/batches.md", re.compile(r"% 1000"), "% 2"),
    ("docs/network-local-steps.md", re.compile(r"range\(1000\)"), "range(20)"),
    ("docs/optimizers.md", re.compile(r"(--train.batch 96.*--train.steps) 20"), r"\1 2"),
    ("docs/faults.md", re.compile(r"state.step < 200"), "state.step < 20"),
    (
        "docs/monitoring-trace.md",
        re.compile(r"^python -m mpitrain trace runs/traced --steps 3.*"),
        "mpirun -np 2 python -m mpitrain --run runs/traced-live --train.steps 3000 & job=$!; "
        "while [ ! -s runs/traced-live/metrics.jsonl ]; do sleep 0.2; done; "
        "python -m mpitrain trace runs/traced-live --steps 3 && python -m mpitrain stop runs/traced-live; wait $job",
    ),
    ("docs/monitoring-trace.md", re.compile(r"100:103"), "10:13"),
    ("docs/monitoring-trace.md", re.compile(r"docs/gallery/"), ""),
    ("docs/monitoring-sinks.md", re.compile(r" wandb"), ""),
    ("", re.compile(r"(?<!b)float16 --train.steps 20"), "float16 --train.steps 3"),
    ("docs/network-compression.md", re.compile(r"exact-steps 50"), "exact-steps 5"),
    (
        "docs/network-compression.md",
        re.compile(r"bench compression"),
        "bench compression --width 64 --layers 1 --rounds 1",
    ),
    (
        "docs/network.md",
        re.compile(r"bench wire"),
        "bench wire --shape 64x2x1 --heads 2 --context 16 --steps 2 --wires fp32,int8",
    ),
    (
        "docs/network.md",
        re.compile(r"bench losses"),
        "bench losses --cases exact,int8 --steps 2 --seeds 1 --settings '--model.layers 1 --model.width 32 --model.heads 2'",
    ),
    ("docs/monitoring-trace.md", re.compile(r"--minutes 10"), "--minutes 0.1"),
    ("README.md", re.compile(r"(runs/(?:mine|package)\b.*--train.steps) 20"), r"\1 2"),
    ("README.md", re.compile(r"^./mpirun/train(?= --train)"), "./mpirun/train --checkpoint.every 10"),
    ("", re.compile(r"step-00001000"), "step-00000020"),
    ("", re.compile(r"(collectives bench .*?)(\s*#.*)?$"), r"\1 --sizes 64KiB\2"),
    ("", re.compile(r"(?<=collectives check)(?= *#)"), " --ranks 1..9"),
]
"""(how the page begins, a pattern, its replacement): applied in turn to the commands and the programs of the page."""

MADE = {
    "documents": "mkdir -p shards && head -qn 20 examples/*.py docs/*.md | python -c 'import json, sys; "
    """[print(json.dumps({"text": line * 9})) for line in sys.stdin]' > shards/web-0.jsonl && cp shards/web-0.jsonl .""",
    "tokens": "python -m mpitrain tokenizer train --data.path 'shards/*.jsonl' --vocab-size 500 --out tokens.json && "
    "mpirun -np 2 python -m mpitrain tokenize --data.path 'shards/*.jsonl' --data.tokenizer tokens.json --out tokens",
    "runs/a": "./mpirun/train --run runs/a --train.steps 20 --train.sample-bytes 0",
    "runs/default": "./mpirun/train --train.steps 20 --checkpoint.every 10 --train.sample-bytes 0",
}
"""What pages take from elsewhere, and the command that makes it."""

NEEDS = {
    "docs/data.md": ["documents", "tokens"],
    "docs/tokenizers.md": ["documents"],
    "docs/checkpoints.md": ["runs/default"],
    "docs/monitoring-watch.md": ["runs/default"],
    "docs/monitoring-report.md": ["runs/a", "runs/default"],
    "docs/monitoring-profile.md": ["runs/a"],
    "docs/faults.md": ["runs/default"],
}

EXAMPLES = {
    "README.md: import torch\n\nimport collectives": "examples/shard_your_model.py",
    "docs/collectives.md: import torch\n\nimport collectives\n\ncomm": "examples/all_reduce.py",
    "docs/faults.md: import os": "examples/elastic.py",
}
"""Programs that are files of examples/, too."""

GOES_ON = {
    "$SCRATCH/run": "one job of a batch system goes on after another",
    "runs/relaunched": "two ways to start the same run",
    "runs/layouts": "a run goes on in another layout",
}
"""Runs that several commands may name."""

FILES = {'docs/coming.md: """Trains a model': "finetune.py"}
"""Blocks that are a file, which the commands of the page run."""

MODEL = """
import itertools

import numpy as np
import torch

import ckpt
import collectives
import mpitrain
from mpitrain.models import GPT, GPTConfig

comm = collectives.world()
torch.manual_seed(comm.rank)
model = GPT(GPTConfig(vocab=256, context=16, width=32, layers=2, heads=2))
tokens = torch.randint(256, (2, 16))
targets = tokens.roll(-1, 1)
"""
SHARDED = (
    MODEL
    + """
mpitrain.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
loss = model(tokens, targets)
"""
)

BEFORE = {
    "docs/training.md: count =": SHARDED,
    "docs/training.md: scaler =": SHARDED,
    "docs/training.md: mpitrain.checkpoint_activations": MODEL
    + "model.encoder, model.decoder = model.blocks[:1], model.blocks[1:]",
    "docs/sharding.md: mpitrain.fully_shard(model)  # each": MODEL,
    "docs/sharding.md: mpitrain.fully_shard(model)\nmpitrain.register": MODEL
    + """
class Model(torch.nn.Sequential):
    def encode(self, x):
        return self[0](x)

    def training_step(self, x):
        return self(x)


model, x = Model(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.randn(2, 4)
""",
    "docs/sharding.md: with mpitrain.unshard": MODEL
    + """
model = torch.nn.Sequential()
model.head = torch.nn.Linear(4, 4)
mpitrain.fully_shard(model)
""",
    "docs/sharding.md: >>> print(mpitrain.summary": MODEL
    + """
model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(256, 4, batch_first=True) for _ in range(4)))
mpitrain.fully_shard(model)
""",
    "docs/sharding.md: for block in": SHARDED,
    "docs/sharding.md: mpitrain.convert_sync": MODEL
    + "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))",
    "docs/sharding.md: config = Llama": MODEL
    + """
from transformers import LlamaConfig, LlamaForCausalLM

folder = "llama-weights"
if comm.rank == 0:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)
comm.barrier()
""",
    "docs/sharding.md: state = torch.load": MODEL
    + """
if comm.rank == 0:
    torch.save(model.state_dict(), "model.pt")
mpitrain.fully_shard(model)
""",
    "docs/sharding.md: MyOptimizer": MODEL
    + """
class MyOptimizer(torch.optim.SGD):
    pass
""",
    "docs/parallel.md: import torch\nimport transformers\n\nimport collectives\nimport mpitrain\n\nfolder": MODEL
    + """
import transformers

if comm.rank == 0:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes)).save_pretrained("Llama")
comm.barrier()
""",
    "docs/optimizers.md: import mpitrain\n": SHARDED,
    "docs/optimizers.md: import mpitrain.models": MODEL,
    "docs/batches.md: import io": """
import io
import itertools
import os
import tarfile

import numpy as np

import collectives

if __name__ == "__main__":  # workers import the program
    comm = collectives.world()
    if comm.rank == 0:
        os.makedirs("images", exist_ok=True)
        for number in range(64):
            with tarfile.open(f"images/train-{number // 16:03}.tar", "a") as tar:
                image = io.BytesIO()
                np.save(image, np.ones((4, 4), np.uint8))
                for suffix, value in (("npy", image.getvalue()), ("cls", b"1")):
                    member = tarfile.TarInfo(f"{number}.{suffix}")
                    member.size = len(value)
                    tar.addfile(member, io.BytesIO(value))
    comm.barrier()
""",
    "docs/network.md: mpitrain.fully_shard": MODEL,
    "docs/network.md: comm =": MODEL + "gradients = torch.ones(100)",
    "docs/network.md: from collectives.codec": MODEL
    + "x, total = np.ones(1000, np.float32), np.zeros(1000, np.float32)",
    "docs/network-local-steps.md: mesh =": MODEL
    + """
def loss(model, step):
    return model(tokens, targets)


def evaluate(model):
    return model(tokens, targets)


""",
    "docs/checkpoints.md: state =": SHARDED + "path = 'random-state'",
    "docs/checkpoints.md: mpitrain.save": MODEL
    + """
model.blocks[0].lora_a = torch.nn.Parameter(torch.ones(4))
mpitrain.fully_shard(model)
optimizer, ema, path = torch.optim.AdamW(model.parameters()), mpitrain.EMA(model, 0.9), "lora"
""",
}
"""The code before a program that a page shows without its beginning."""

AFTER = {
    "README.md: import torch\n\nimport collectives": """
import ckpt

assert ckpt.open("example-checkpoints/step-10")["model/0.linear1.weight"].shape == (2048, 256)
""",
    "docs/training.md: count =": "loss.backward()",
    "docs/sharding.md: mpitrain.fully_shard(model)  # each": "model(tokens, targets).backward()",
    "docs/sharding.md: for block in": "model(tokens, targets).backward()",
    "docs/sharding.md: mpitrain.convert_sync": "model(torch.randn(2, 4)).sum().backward()",
    "docs/sharding.md: config = Llama": "assert model(input_ids=tokens, labels=tokens).loss.isfinite()",
    "docs/sharding.md: MyOptimizer": "mpitrain.fully_shard(model)\nMyOptimizer(model.parameters()).step()",
    "docs/optimizers.md: import mpitrain\n": "optimizer.step()",
    "docs/optimizers.md: import mpitrain.models": "optimizer.step()",
    "docs/network.md: mpitrain.fully_shard": "model(tokens, targets).backward()",
    "docs/network.md: from collectives.codec": "assert np.allclose(total, x, atol=0.1)",
    "docs/batches.md: import io": """
if __name__ == "__main__":
    model = torch.nn.Linear(16, 2)
    mpitrain.fully_shard(model)
    train(model, torch.optim.AdamW(model.parameters()))
    assert ckpt.latest("checkpoints")
""",
}
"""The code after a program: what makes it do something, and a look at what it has done."""

ALTERNATIVES = ("docs/training.md: mpitrain.checkpoint_activations",)
"""Programs of which each statement is one of several ways: they run one by one, each after the code before."""

READ_BY = {
    "docs/data.md: [[data.sources]]": """python -c 'from mpitrain.job.config import parse; print(parse(["--config", "FILE"]))'""",
    "docs/plan.md: name =": "python -m mpitrain plan --machine FILE --model gpt-xl --ranks 16 --batch 64 --context 1024 --top 1",
}
"""The command that reads a FILE of the format toml."""

RANKS = {
    "docs/data.md: import json": 1,
    "docs/parallel.md: import torch\n\nimport collectives\nimport mpitrain\nfrom mpitrain.models": 4,
    "docs/pipelines.md: import torch\n\nimport collectives\nimport mpitrain\nfrom mpitrain.tensor": 4,
    "docs/checkpoints.md: import jax": 1,
    "docs/collectives.md: import torch\n\nimport collectives\n\n\ndef add": 4,
}
"""The number of ranks of a program; 2 unless given."""

SHOWN = {
    "README.md: 2 ranks on 1 node": "./mpirun/train",
    "docs/training.md: run runs/layouts goes on": "mpirun -np 2 python -m mpitrain --run runs/layouts",
    "docs/pipelines.md: pipeline zb-h1": "mpirun -np 4 python -m mpitrain --run runs/zero-bubble",
    "docs/plan.md: llama3-70b: ": "python -m mpitrain plan --model llama3-70b",
    "docs/plan.md: llama3-405b, ": "python -m mpitrain plan --model llama3-405b",
    "docs/collectives.md: rank 0 of 2": "mpirun -np 2 python examples/all_reduce.py",
    "docs/monitoring-profile.md: ": "mpirun -np 2 python -m mpitrain profile --train.accumulate 4",
    "docs/doctor.md: mpitrain doctor: 4 ranks": "./mpirun/cluster run -H 2x2",
}
"""The command of the page of which a block shows the output."""

EXIT_CODES = {
    "docs/reproducibility.md: python -m mpitrain diff runs/on-2 runs/on-1": 1,
    "docs/checkpoints.md: python -m ckpt diff runs/look": 1,
}
"""Of commands that end with another exit code than 0."""

FREE = (
    "[[",  # values of an array
    *("  ok      node memory", "  ok      need of", "  ok      old copies", "1 note"),  # other jobs on the host
    "           memory of rank 0 at its peak",  # the layer differs
    "  Ranks 0, 1 wait",  # what a profile finds differs
)
"""How lines begin of which only the place is compared: they differ from run to run."""

EXACT = ("docs/plan.md: ",)
"""Outputs that are the same on every machine: not only their shape is compared."""


def entry(entries: dict[str, T], step: Block | Command) -> T | None:
    """What a part of the table has for a step: by the page, or by the page and how the step begins."""
    found = [value for start, value in entries.items() if step.key.startswith(start)]
    return found[-1] if found else None
