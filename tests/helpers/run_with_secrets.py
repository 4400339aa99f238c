"""A program that trains with secrets in its settings, its environment and an error of the user's code, and reads the run:
python run_with_secrets.py FOLDER ADDRESS."""

import contextlib
import io
import os
import sys
from pathlib import Path

from mpitrain.cli import main

SECRETS = [f"S3CRET{number:02}" for number in range(1, 21)]
OF_ENVIRONMENT = {"AWS_SECRET_ACCESS_KEY": SECRETS[17], "HF_TOKEN": f"hf_{SECRETS[18]}abcdefghijklmnopqrstuvwxyz"}

HOOKS = """
import mpitrain, os, signal
class Failing(mpitrain.Callback):
    def step(self, moment):
        if moment.step == 2:
            os.kill(os.getpid(), signal.SIGUSR2)
        if moment.step == 3:
            password = "{0}"
            variables = dict(list(os.environ.items())[-9:])
            raise OSError(f"cannot reach https://u:{{password}}@h/a, {{variables}}, {{dict(Authorization='Bearer {0}')}}")
mpitrain.log(callback=Failing())
"""


def settings(folder: Path, address: str, *, steps: int, signature: str) -> list[str]:
    """The words of a launch: two sources, a held-out one, copies, and texts with addresses."""
    s = dict(enumerate(SECRETS, 1))
    host = address.partition("://")[2]
    config = folder / f"settings-{steps}.toml"
    (folder / "hooks.py").write_text(HOOKS.format(s[20]))
    config.write_text(
        f'[log]\non_event = ": https://hooks.example/{s[1]}"\n'
        f'[[data.sources]]\nname = "a"\npath = ["http://{s[2]}:{s[3]}@{host}/a.jsonl"]\n'
        f'[[data.sources]]\nname = "b"\npath = ["{address}/b.jsonl?X-Amz-Signature={signature}&X-Amz-Credential={s[4]}&part=1"]\n'
        f'[[data.sources]]\nname = "c"\npath = ["{address}/c.jsonl?{s[5]}#{s[6]}"]\n'
        f'[[data.heldout_sources]]\nname = "d"\npath = ["{address}/d.jsonl?apikey={s[7]}"]\n'
    )
    return [
        "--config", str(config), "--run", str(folder / "run"), "--train.steps", str(steps), "--train.batch", "2",
        *("--model.vocab", "256", "--model.context", "32", "--model.width", "32", "--model.layers", "1", "--model.heads", "1"),
        *("--train.eval_batches", "1", "--train.sample_bytes", "1", "--data.processes", "0", "--data.cache", str(folder / "cache")),
        *("--parallel.threads", "1", "--checkpoint.every", "1"),
        *("--checkpoint.copies", f"memory://{s[8]}:{s[9]}@copies/run", f"memory://u:in {s[13]} words@copies/b"),
        *("--log.sinks", "csv", "tensorboard", *["wandb"][: steps - 2], "--log.modules", str(folder / "hooks.py")),
        *("--log.project", f"of hf_{s[14]}{'x' * 20}"),
        "--train.sample_prompt", f"see https://x.example/?token={s[10]} https://{s[11]}@w.example/p Authorization: Basic {s[15]}, "
        f"AWS_SESSION_TOKEN={s[16]} {{'password': '{s[17]}'}} https%3A%2F%2Fu%3A{s[17]}%40h",
    ]  # fmt: skip


if __name__ == "__main__":
    folder, address = Path(sys.argv[1]), sys.argv[2]
    os.environ |= {
        **OF_ENVIRONMENT,
        "WANDB_MODE": "offline",
        "WANDB_CACHE_DIR": f"{folder}/w",
        "WANDB_CONFIG_DIR": f"{folder}/w",
    }
    assert main(settings(folder, address, steps=1, signature=SECRETS[11])) == 0
    print("SECOND LAUNCH", flush=True)
    try:
        main(settings(folder, address, steps=3, signature="another" + SECRETS[11]))
    except OSError:
        sys.excepthook(*sys.exc_info())
    else:
        raise AssertionError("hooks.py has not raised")
    print("COMMANDS", flush=True)
    run = str(folder / "run")
    with contextlib.redirect_stderr(io.StringIO()) as refusal:
        assert main(["trace", run]) == 1
    assert refusal.getvalue().startswith(f"mpitrain: error: trace: no job trains in {run}: "), refusal.getvalue()
    assert main(["report", run, "--out", str(folder / "report.html")]) == 0
    assert main(["watch", run, "--once"]) == 0
    assert main(["profile", run]) == 0
    first, second = (str(folder / f"run/checkpoints/step-{step:08}") for step in (1, 2))
    assert main(["diff", first, second]) == 1
    assert main(["--run", run, "--train.eval-only"]) == 1, "addresses are taken from the words of a launch"
    for path in (f"http://u:{SECRETS[2]}@127.0.0.1:9/a.tar", f"http://127.0.0.1:9/a.jsonl?X-Signature={SECRETS[3]}"):
        assert main(["--run", str(folder / "other"), "--data.path", path]) == 1
    assert main(["--run", str(folder / "other"), "--resume", f"http://u:{SECRETS[2]}@127.0.0.1:9/step-1"]) == 1
