"""Building TensorRT plans. Nothing here runs one: that is `headport.runtime.tensorrt`."""
