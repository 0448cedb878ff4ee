"""The ways that tables compare: by hand, Lightning, Fabric, Accelerate, and ours."""
