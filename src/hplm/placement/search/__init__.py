"""The search for a placement: AlpaServe's algorithms 1 and 2, their baselines, and the placement of tenants."""
