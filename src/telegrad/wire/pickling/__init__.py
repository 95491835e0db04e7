"""Values that have to be pickled: tensors are put aside, functions of a script go by name or whole."""
