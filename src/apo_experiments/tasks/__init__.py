"""The paper's training problems: each module has a function ``(options, setting) -> Problem`` and its ``DEFAULTS``.

An option called ``data`` says where the data come from: ``"official"`` files, or ``"generated"`` stand-ins that need
no files and train in seconds.
"""
