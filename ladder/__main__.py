"""`python -m rungwise.ladder`: the command line without its script; how children are started."""

from rungwise.ladder.cli import main

if __name__ == "__main__":
    main()
