"""CUDA kernels that crop and resize images of different sizes.

JAX queues its programs on one stream per GPU, where they would wait for the training steps ahead of them. These kernels
run on the decoder's stream.
"""

THREADS = 128  # per CTA; consecutive threads compute consecutive columns

# Both kernels compute one pixel of one image per thread: column blockIdx.x * blockDim.x + threadIdx.x, row blockIdx.y,
# image blockIdx.z. The rows between the passes are uint8, as in Pillow.
SOURCE = r"""
// Bicubic kernel of Keys (1981) with a = -0.5.
__device__ float bicubic(float x) {
  x = fabsf(x);
  if (x < 1.0f) return (1.5f * x - 2.5f) * x * x + 1.0f;
  if (x < 2.0f) return ((-0.5f * x + 2.5f) * x - 4.0f) * x + 2.0f;
  return 0.0f;
}

// One RGB pixel of an axis resized from `length` pixels, from fractional pixel `start` on, to `size` pixels.
// The support grows with the reduction (antialiasing). Weights outside of the whole pixels [0, limit) are zero.
__device__ void resample(const unsigned char* pixels, long long stride, int limit, float start, float length, int size,
                         int index, unsigned char* result) {
  float scale = length / size;
  float filter_scale = scale > 1.0f ? scale : 1.0f;
  float center = start + (index + 0.5f) * scale;
  int first = (int)floorf(center - 2.0f * filter_scale + 0.5f);
  int last = (int)floorf(center + 2.0f * filter_scale + 0.5f);
  first = first < 0 ? 0 : first;
  last = last > limit ? limit : last;
  float weights = 0.0f, sums[3] = {0.0f, 0.0f, 0.0f};
  for (int i = first; i < last; ++i) {
    float weight = bicubic((i + 0.5f - center) / filter_scale);
    const unsigned char* pixel = pixels + i * stride;
    weights += weight;
    for (int c = 0; c < 3; ++c) sums[c] += weight * pixel[c];
  }
  for (int c = 0; c < 3; ++c) {
    float level = floorf(sums[c] / weights + 0.5f);
    result[c] = (unsigned char)(level < 0.0f ? 0.0f : level > 255.0f ? 255.0f : level);
  }
}

// images [n]: addresses of uint8 [H, W, 3]; pitches [n]: bytes per row; boxes [n, 4]: top, left, height, width;
// offsets [n + 1]: first row of each image in `rows`, uint8 [offsets[n], size, 3].
extern "C" __global__ void resize_columns(const unsigned long long* images, const long long* pitches,
                                          const float* boxes, const int* offsets, int size, unsigned char* rows) {
  int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, n = blockIdx.z;
  if (column >= size || row >= offsets[n + 1] - offsets[n]) return;
  const float* box = boxes + 4 * n;
  int top = (int)floorf(box[0]), left = (int)floorf(box[1]);
  const unsigned char* pixels = (const unsigned char*)images[n] + (top + row) * pitches[n] + 3LL * left;
  resample(pixels, 3, (int)ceilf(box[1] + box[3]) - left, box[1] - left, box[3], size, column,
           rows + ((long long)(offsets[n] + row) * size + column) * 3);
}

// results [n]: first row of each image in `resized`, uint8 [..., size, 3].
extern "C" __global__ void resize_rows(const unsigned char* rows, const float* boxes, const int* offsets, int size,
                                       const long long* results, unsigned char* resized) {
  int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, n = blockIdx.z;
  if (column >= size) return;
  const float* box = boxes + 4 * n;
  const unsigned char* pixels = rows + ((long long)offsets[n] * size + column) * 3;
  resample(pixels, 3LL * size, offsets[n + 1] - offsets[n], box[0] - floorf(box[0]), box[2], size, row,
           resized + ((results[n] + row) * size + column) * 3);
}
"""
