"""The data of the experiments: official files, their loaders, and streams of batches on the device.

Read it from the bottom up: :mod:`~apo_experiments.data.registry` says what the official files are,
:mod:`~apo_experiments.data.locate` finds them, :mod:`~apo_experiments.data.fetch` downloads and verifies them,
``images``, ``tables`` and ``text`` load them (or generate a small stand-in), ``streams`` makes batches.
"""
