"""Suites of benchmarks, and the metric that a suite averages.

Names and main metrics are DataComp's (arXiv:2304.14108, table 7; `tasklist.yml` of mlfoundations/datacomp). The
name of a benchmark gives its folder in the layout of clip_benchmark: "vtab/pets" is in `wds_vtab-pets`, or in
`wds_vtab-pets_test` as DataComp downloads it.
"""

IMAGENET_VARIANTS = ("imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet")
RETRIEVAL = ("flickr30k", "mscoco_captions")
DATACOMP38 = (
    "imagenet1k",
    *IMAGENET_VARIANTS,
    "vtab/caltech101",
    "cifar10",
    "vtab/cifar100",
    "vtab/clevr_count_all",
    "vtab/clevr_closest_object_distance",
    "country211",
    "vtab/dtd",
    "vtab/eurosat",
    "fgvc_aircraft",
    "food101",
    "gtsrb",
    "vtab/kitti_closest_vehicle_distance",
    "mnist",
    "vtab/flowers",
    "vtab/pets",
    "voc2007",
    "vtab/pcam",
    "renderedsst2",
    "vtab/resisc45",
    "cars",
    "stl10",
    "sun397",
    "vtab/svhn",
    *RETRIEVAL,
    "misc/winogavil",
    "wilds/iwildcam",
    "wilds/camelyon17",
    "wilds/fmow",
    "fairness/dollar_street",
    "fairness/geode",
)

SUITES = {"imagenet_variants": IMAGENET_VARIANTS, "retrieval": RETRIEVAL, "datacomp38": DATACOMP38}

# The others have top1, or mean_r1 for retrieval.
MAIN_METRICS = {
    "vtab/caltech101": "mean_per_class_recall",
    "fgvc_aircraft": "mean_per_class_recall",
    "vtab/flowers": "mean_per_class_recall",
    "vtab/pets": "mean_per_class_recall",
    "wilds/iwildcam": "macro_f1",
    "wilds/fmow": "worst_group_top1",
    "fairness/dollar_street": "worst_group_top5",
    "fairness/geode": "worst_group_top1",
}

# Region "Other" of FMoW, which the worst region leaves out (WILDS, arXiv:2012.07421, appendix E.7).
IGNORED_GROUPS = {"wilds/fmow": (5,)}

# Files of Karpathy's splits, where there is no folder in the layout of clip_benchmark.
KARPATHY_FILES = {
    "flickr30k": ("flickr30k/dataset_flickr30k.json", "dataset_flickr30k.json"),
    "mscoco_captions": ("coco/dataset_coco.json", "dataset_coco.json"),
}
