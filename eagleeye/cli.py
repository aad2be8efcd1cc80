"""The verbs. Each subcommand lives in its own small pair of functions: one adds its options, one runs it and imports inside."""

import argparse
import sys
from collections.abc import Callable, Sequence

from eagleeye import __version__
from eagleeye.errors import EagleEyeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code. A user's mistake prints one sentence, never a traceback."""
    parser = argparse.ArgumentParser(prog="eagleeye", description="Which rank of the training job is bad, and why.")
    parser.add_argument("--version", action="version", version=f"eagleeye {__version__}")
    parser.add_argument("--config", metavar="FILE", help="settings; default ./eagleeye.toml when it exists")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (summary, add_options, run) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        add_options(verb)
        verb.set_defaults(run=run)
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except EagleEyeError as error:
        print(f"eagleeye {options.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {}
