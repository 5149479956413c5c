"""Is an engine lossless? Its tokens against the target's law, and its greedy text against plain decoding."""
