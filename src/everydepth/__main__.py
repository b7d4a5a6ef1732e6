"""`python -m everydepth` is the `everydepth` command."""

from everydepth.cli.main import main

if __name__ == "__main__":
    main()
