"""Places for the labels of a scatter plot: beside their points, not over one another, joined to them by lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

DISTANCES = (7.0, 13.0, 20.0, 30.0, 42.0, 60.0)  # points from a mark to its label's nearest edge
ANGLES = 16  # directions that are tried at each distance
ROUNDS = 3  # times that every label is placed anew among the others
CLASH = 200.0  # points of distance that an overlap is worth
CROSSING = 40.0  # the same of a line that crosses a label or another line
GAP = 1.5  # points kept free around a label


class Box(NamedTuple):
    """A rectangle in points, y upwards."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def holds(self, other: Box) -> bool:
        return (
            self.left <= other.left
            and self.bottom <= other.bottom
            and other.right <= self.right
            and other.top <= self.top
        )

    def widened(self) -> Box:
        """The rectangle with ``GAP`` around it."""
        return Box(self.left - GAP, self.bottom - GAP, self.right + GAP, self.top + GAP)

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the rectangle that is nearest to ``x`` and ``y``."""
        return min(max(x, self.left), self.right), min(max(y, self.bottom), self.top)


Point = tuple[float, float]
Line = tuple[Point, Point]


class Scene(NamedTuple):
    """The surroundings of labels, in points: their marks, the frame that holds them, marks and lines to keep clear."""

    points: Sequence[Point]
    frame: Box
    obstacles: Sequence[Box] = ()
    lines: Sequence[Line] = ()


def place_labels(scene: Scene, sizes: Sequence[Point]) -> list[Box]:
    """A box for the label of each of the scene's points, with as few overlaps as are found.

    ``sizes`` are widths and heights of the labels in points. The labels are placed one after another where each costs
    least, and then anew among the others.
    """
    placed: dict[int, Box] = {}
    for _ in range(ROUNDS):
        for i in sorted(range(len(sizes)), key=lambda i: -scene.points[i][1]):
            placed.pop(i, None)
            placed[i] = _cheapest(i, sizes[i], scene, placed)
    return [placed[i] for i in range(len(sizes))]


def _cheapest(i: int, size: Point, scene: Scene, placed: Mapping[int, Box]) -> Box:
    """The best place for the label of point ``i`` among those that are ``placed``."""
    best, least = None, math.inf
    for box in _candidates(scene.points[i], size):
        cost = _clash_cost(box, i, scene, placed)
        if cost < least:  # crossings take the most time to find
            cost += _crossing_cost(box, i, scene, placed)
        if cost < least:
            best, least = box, cost
    assert best is not None, "there are candidates"
    return best


def _candidates(point: Point, size: Point) -> Iterator[Box]:
    """Boxes around ``point``, near ones and those to the right first."""
    (x, y), (width, height) = point, size
    for distance in DISTANCES:
        for step in range(ANGLES):
            angle = -2 * math.pi * step / ANGLES
            dx, dy = math.cos(angle), math.sin(angle)
            left = x + distance * dx - width * (1 - dx) / 2
            bottom = y + distance * dy - height * (1 - dy) / 2
            yield Box(left, bottom, left + width, bottom + height)


def _clash_cost(box: Box, i: int, scene: Scene, placed: Mapping[int, Box]) -> float:
    wide = box.widened()
    clashes = sum(map(wide.overlaps, (*placed.values(), *scene.obstacles))) + 2 * (not scene.frame.holds(box))
    distance = math.dist(scene.points[i], box.nearest(*scene.points[i]))
    return max(DISTANCES[0], distance) + CLASH * clashes


def _crossing_cost(box: Box, i: int, scene: Scene, placed: Mapping[int, Box]) -> float:
    wide, leader = box.widened(), (scene.points[i], box.nearest(*scene.points[i]))
    leaders = [(scene.points[j], other.nearest(*scene.points[j])) for j, other in placed.items()]
    crossings = sum(_cross(leader, other) for other in leaders)
    crossings += sum(_crosses_box(leader, other) for other in placed.values())
    crossings += sum(_crosses_box(line, wide) for line in (*leaders, *scene.lines))
    return CROSSING * crossings


def _crosses_box(line: Line, box: Box) -> bool:
    corners = [(box.left, box.bottom), (box.right, box.bottom), (box.right, box.top), (box.left, box.top)]
    return any(_cross(line, (corners[i], corners[i - 1])) for i in range(4))


def _cross(one: Line, two: Line) -> bool:
    """Whether two lines cross inside both."""
    return _side(one, two[0]) * _side(one, two[1]) < 0 and _side(two, one[0]) * _side(two, one[1]) < 0


def _side(line: Line, point: Point) -> float:
    (ax, ay), (bx, by) = line
    return (bx - ax) * (point[1] - ay) - (by - ay) * (point[0] - ax)
