"""`python -m lakehead` is the command ``lakehead``."""

from lakehead.cli.main import run

if __name__ == "__main__":
    run()
