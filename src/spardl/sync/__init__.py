"""Plan, step and session: how groups of tensors are synchronised, whoever brings them."""
