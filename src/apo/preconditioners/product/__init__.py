"""Three ways to compute P g and its pull-back: layer by layer, similar layers together, or as a CUDA graph."""
