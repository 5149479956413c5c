"""The laboratory: a toy language small enough to know every probability, and proofs made with it.

``toy`` is the language and the statistics, ``toy_sampling`` its samplers draw by draw, ``fast_sampling`` the
vectorised ones. ``enumeration`` holds exact laws, ``chains``, ``trees`` and ``coupling`` the rules.
One module per question: ``distribution``, ``acceptance``, ``speedups``, ``rules``, and ``roofline`` with
``devices`` and ``model_shape``. ``tables`` and ``plots`` show the answers.
"""
