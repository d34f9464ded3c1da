"""Models from files: Python, exported programs, ONNX, configurations of Hugging Face."""
