"""The paper on the command line: every figure and table, small on a laptop or in full on a GPU.

This package imports :mod:`apo`, never the reverse.
"""
