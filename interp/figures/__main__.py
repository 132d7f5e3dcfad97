"""`python -m interp.figures`: see `interp.redraw`."""

from interp.redraw import main

if __name__ == "__main__":
    raise SystemExit(main())
