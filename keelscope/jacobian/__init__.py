"""Jacobians of normalisation layers in closed form.

`norms` says what a norm computes, `recognition` finds that form for a module by its behaviour (with `readers`,
`fitting` and `standin`), `closed_forms` has the derivative per token (with `rowsums`), `spectrum` its exact largest
singular value.
"""
