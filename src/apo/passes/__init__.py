"""Running the network again: recorded forward passes, run at other weights without leaving a trace."""
