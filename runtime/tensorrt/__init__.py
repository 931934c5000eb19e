"""Running TensorRT plans. No TensorRT object is made before the driver has shown a GPU."""
