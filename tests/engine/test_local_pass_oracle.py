"""`LocalPass` on random programs, heard in any order, equals one `torch.autograd.backward`: leaves, Recvs, hooks."""

from hypothesis import given

from tests.engine.programs import Program, build, chains, in_local_pass, in_one_call, programs


@given(programs())
def test_equals_one_backward(program: Program) -> None:
    assert in_local_pass(program, build(program)) == in_one_call(program, build(program))


@given(programs())
def test_equals_one_backward_over_a_retained_graph(program: Program) -> None:
    ours, theirs = build(program), build(program)
    for retain_graph in (True, True, False):
        assert in_local_pass(program, ours, retain_graph) == in_one_call(program, theirs, retain_graph)


@given(chains())
def test_equals_one_backward_where_a_cut_goes_on(program: Program) -> None:
    """Gradients come while an engine call waits for them, or too late for it."""
    ours, theirs = build(program), build(program)
    for retain_graph in (True, False):
        assert in_local_pass(program, ours, retain_graph, waits=True) == in_one_call(program, theirs, retain_graph)
