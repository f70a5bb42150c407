"""`python -m hplm_cli`: the program `hplm`."""

from hplm_cli import main

# A process that the program starts may import this module again.
if __name__ == "__main__":
    main()
