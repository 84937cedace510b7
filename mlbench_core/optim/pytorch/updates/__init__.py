"""Updates of parameters, which an optimizer of this library can wrap: no workers take part."""
