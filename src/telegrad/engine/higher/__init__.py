"""Passes beyond the first order: gradients that are themselves part of a graph, and gradients of chosen tensors.

With `create_graph` a message with gradients is recorded like a call's: a Send where they leave, a Recv where they
arrive. So the graph of the gradients is an ordinary distributed graph, and any later pass runs over it unchanged.

    forward    A: x --Send m--> B: Recv m -> y --Send n--> A: Recv n
    pass 1     A: gradient of y --Send n'--> B: Recv n' -> gradient of x --Send m'--> A: Recv m'
    pass 2     begins anywhere: Recv m' tells Send m' on B, whose graph leads to Recv n', Recv m and the parameters

Plain passes do not come here: they send other messages, and run other methods.
"""
