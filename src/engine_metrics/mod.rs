//! What an inference engine's metrics page says of its KV cache, its queue and its state.
