"""Where people already train: thin bridges to frameworks, each of which imports its framework only when it is used."""
