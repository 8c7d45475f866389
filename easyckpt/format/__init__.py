"""What the bytes of a checkpoint mean: names, layout, encoding, checksums, records.

Everything here is pure: no files, no threads, no devices. Input that comes from a file is never trusted:
every reader raises a subclass of :class:`easyckpt.errors.FormatError` and runs no code from it.
"""
