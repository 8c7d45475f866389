"""``python -m easyckpt`` is the ``easyckpt`` command."""

from __future__ import annotations

from easyckpt.cli import main

if __name__ == "__main__":
    main()
