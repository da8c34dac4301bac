"""Jacobians: of normalisation layers in closed form, of any block by products on its live graph.

`norms` says what a norm computes, `recognition` finds that form for a module by its behaviour (with `readers`,
`fitting` and `standin`), `closed_forms` has the derivative per token (with `rowsums`), `spectrum` its exact largest
singular value.

`linearised` multiplies with the Jacobian of a module call and `passage` brings that into the hooks. The estimators take
any operator given by its products: `operators` for Frobenius norms, `lanczos` for singular values, `lyapunov` for
exponents.
"""
