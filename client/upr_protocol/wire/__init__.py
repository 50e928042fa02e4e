"""The wire: generated code and the codec. The core never imports it."""
