"""Thin adapters to training frameworks, each of which is imported only when it is used."""
