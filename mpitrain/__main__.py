"""`python -m mpitrain`."""

from mpitrain.train import stop

# Before all other imports: without a handler, a request to stop would end the process.
stop.listen()

from mpitrain.cli import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
