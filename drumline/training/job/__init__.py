"""What a run trains with: model, optimizer, learning rates, data and metrics, built and compared
across ranks."""
