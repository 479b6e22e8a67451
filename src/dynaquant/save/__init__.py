"""One save: what each tensor is stored as, the background write, the record."""
