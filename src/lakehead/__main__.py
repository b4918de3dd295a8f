"""``python -m lakehead``: the ``lakehead`` command."""

from lakehead.cli.main import run

if __name__ == "__main__":
    run()
