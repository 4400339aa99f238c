"""`import FILE DIR`: makes a checkpoint from safetensors files or a torch `.pt`."""

import argparse

from ckpt.commands.reshard import add_files, print_made
from ckpt.commands.terminal import Commands, UsageError, add_json, local, shown_progress, told_in_a_line
from ckpt.convert.importing import import_file
from ckpt.reading.checkpoint import open_checkpoint
from ckpt.storage.catalog import step_of


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser("import", help="make a checkpoint from safetensors files or a torch .pt")
    parser.add_argument(
        "file",
        metavar="FILE",
        type=local,
        help="*.safetensors; a folder or an index with Hugging Face's names; or torch's *.pt, whose code is not run",
    )
    parser.add_argument(
        "dir", metavar="DIR", type=local, help="the new checkpoint, such as run/checkpoints/step-00000000"
    )
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", help="only tensors with these names in FILE; repeatable"
    )
    parser.add_argument("--prefix", metavar="PREFIX", default="", help="add it before the names, such as model/")
    parser.add_argument("--step", metavar="N", type=_step, help='the number of the step, for the meta: {"step": N}')
    add_files(parser, default="one")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint DIR")
    add_json(parser)
    parser.set_defaults(run=_run)


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 0")
    return int(text)


def _run(args: argparse.Namespace) -> None:
    named = step_of(args.dir.name)
    if None not in (args.step, named) and args.step != named:  # `ls` and the removal of old checkpoints use the name
        raise UsageError(f"--step {args.step}, but the name {args.dir.name!r} says {named}; expected the same number")
    meta = {} if args.step is None else {"step": args.step}
    with told_in_a_line(), shown_progress("importing", None) as progress:
        path = import_file(
            args.file,
            args.dir,
            only=args.only,
            prefix=args.prefix,
            meta=meta,
            files=args.files,
            overwrite=args.overwrite,
            progress=progress,
        )
    print_made(open_checkpoint(path), as_json=args.json)
