"""A program that trains twice with secrets in its settings, and reads the run: python run_with_secrets.py FOLDER ADDRESS SECOND."""

import sys
from pathlib import Path

from mpitrain.cli import main

SECRETS = [f"S3CRET{number:02}" for number in range(1, 13)]


def settings(folder: Path, address: str, *, steps: int, signature: str) -> list[str]:
    """The words of a launch: two sources, a held-out one, copies, and texts with addresses."""
    s = dict(enumerate(SECRETS, 1))
    host = address.partition("://")[2]
    config = folder / f"settings-{steps}.toml"
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
        *("--checkpoint.copies", f"memory://{s[8]}:{s[9]}@copies/run", "--log.sinks", "csv", "tensorboard"),
        *("--train.sample_prompt", f"see https://x.example/?token={s[10]}", "--log.project", f"https://{s[11]}@w.example/p"),
    ]  # fmt: skip


if __name__ == "__main__":
    folder, address = Path(sys.argv[1]), sys.argv[2]
    assert main(settings(folder, address, steps=1, signature=SECRETS[11])) == 0
    print("SECOND LAUNCH", flush=True)
    assert main(settings(folder, address, steps=2, signature="another" + SECRETS[11])) == 0
    print("COMMANDS", flush=True)
    run = str(folder / "run")
    assert main(["report", run, "--out", str(folder / "report.html")]) == 0
    assert main(["watch", run, "--once"]) == 0
    assert main(["profile", run]) == 0
    first, second = (str(folder / f"run/checkpoints/step-{step:08}") for step in (1, 2))
    assert main(["diff", first, second]) == 1
    assert main(["--run", run, "--train.eval-only"]) == 1, "addresses are taken from the words of a launch"
    for path in (f"http://u:{SECRETS[2]}@127.0.0.1:9/a.tar", f"http://127.0.0.1:9/a.jsonl?X-Signature={SECRETS[3]}"):
        assert main(["--run", str(folder / "other"), "--data.path", path]) == 1
    assert main(["--run", str(folder / "other"), "--resume", f"http://u:{SECRETS[2]}@127.0.0.1:9/step-1"]) == 1
