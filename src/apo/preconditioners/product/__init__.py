"""The product P g and its pull-back: layer by layer, with similar layers bundled, or replayed as a CUDA graph."""
