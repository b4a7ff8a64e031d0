"""The commands, one per file, with ``add_to(subparsers)`` and an ``execute(arguments)`` that returns an exit code.

Nothing heavy is imported before a command is executed, so that ``--help`` is fast.
"""
