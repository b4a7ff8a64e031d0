"""The commands, one a file: each has ``add_to(subparsers)`` and an ``execute(arguments)`` that returns an exit code.

Nothing heavy is imported before a command is executed, so that ``--help`` is there at once.
"""
