"""One restore: which parts fit, and filling the live objects or plain tensors."""
