"""The commands, one per file, with an ``execute(arguments)`` that returns an exit code."""
