"""What a training job is: the components of its state, its generators, its place in the data."""
