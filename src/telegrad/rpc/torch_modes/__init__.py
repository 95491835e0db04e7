"""What of torch belongs to one process or thread, and how a call deals with it: autocast, torch.compile, seeds, the
stand-in for torch.distributed.rpc.
"""
