// The part of ONNX Runtime's C interface that the operators use, declared by hand: it is a table of functions that only
// grows at its end (onnxruntime_c_api.h, struct OrtApi; onnxruntime_c_api.cc asserts the positions), so one binary works
// with every version from 1.18 on and no header of theirs is needed.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(_WIN32) && !defined(_WIN64)
#define ORT_CALL __stdcall
#else
#define ORT_CALL
#endif

struct OrtStatus;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtShape;
struct OrtSessionOptions;
struct OrtDomain;

struct OrtApi { void* at[280]; };  // functions of version 18 and before
struct OrtApiBase { const OrtApi*(ORT_CALL* get_api)(uint32_t version); const char*(ORT_CALL* version)(); };

// struct OrtCustomOp up to version 16 of the interface, the first with statuses instead of exceptions.
struct OrtCustomOp {
  uint32_t version;
  void*(ORT_CALL* create_without_status)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char*(ORT_CALL* name)(const OrtCustomOp*);
  const char*(ORT_CALL* provider)(const OrtCustomOp*);
  int(ORT_CALL* input_type)(const OrtCustomOp*, size_t);
  size_t(ORT_CALL* num_inputs)(const OrtCustomOp*);
  int(ORT_CALL* output_type)(const OrtCustomOp*, size_t);
  size_t(ORT_CALL* num_outputs)(const OrtCustomOp*);
  void(ORT_CALL* compute_without_status)(void*, OrtKernelContext*);
  void(ORT_CALL* destroy)(void*);
  int(ORT_CALL* input_kind)(const OrtCustomOp*, size_t);
  int(ORT_CALL* output_kind)(const OrtCustomOp*, size_t);
  int(ORT_CALL* input_memory)(const OrtCustomOp*, size_t);
  int(ORT_CALL* variadic_input_min)(const OrtCustomOp*);
  int(ORT_CALL* variadic_input_same)(const OrtCustomOp*);
  int(ORT_CALL* variadic_output_min)(const OrtCustomOp*);
  int(ORT_CALL* variadic_output_same)(const OrtCustomOp*);
  OrtStatus*(ORT_CALL* create)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus*(ORT_CALL* compute)(void*, OrtKernelContext*);
};

namespace edgespec {

enum { kTypeFloat = 1, kTypeUint8 = 2, kTypeInt32 = 6, kTypeInt64 = 7 };  // ONNXTensorElementDataType
enum { kRequired = 0, kOptional = 1 };                             // OrtCustomOpInputOutputCharacteristic
enum { kFail = 1, kInvalidArgument = 2 };                          // OrtErrorCode

extern const OrtApi* ort;
template <class Result, class... Args> Result ort_call(int position, Args... args) {
  return reinterpret_cast<Result(ORT_CALL*)(Args...)>(ort->at[position])(args...);
}
inline OrtStatus* error(int code, const char* text) { return ort_call<OrtStatus*>(0, code, text); }
inline void release(OrtStatus* s) { ort_call<void>(93, s); }
inline void release(OrtShape* s) { ort_call<void>(99, s); }
inline OrtStatus* new_domain(const char* name, OrtDomain** out) { return ort_call<OrtStatus*>(26, name, out); }
inline OrtStatus* add_operator(OrtDomain* d, const OrtCustomOp* op) { return ort_call<OrtStatus*>(27, d, op); }
inline OrtStatus* add_domain(OrtSessionOptions* o, OrtDomain* d) { return ort_call<OrtStatus*>(28, o, d); }
inline OrtStatus* data(OrtValue* v, void** out) { return ort_call<OrtStatus*>(51, v, out); }
inline OrtStatus* element_type(const OrtShape* s, int* out) { return ort_call<OrtStatus*>(60, s, out); }
inline OrtStatus* rank(const OrtShape* s, size_t* out) { return ort_call<OrtStatus*>(61, s, out); }
inline OrtStatus* dims(const OrtShape* s, int64_t* out, size_t count) { return ort_call<OrtStatus*>(62, s, out, count); }
inline OrtStatus* shape(const OrtValue* v, OrtShape** out) { return ort_call<OrtStatus*>(65, v, out); }
inline OrtStatus* attribute(const OrtKernelInfo* i, const char* name, float* out) { return ort_call<OrtStatus*>(85, i, name, out); }
inline OrtStatus* attribute(const OrtKernelInfo* i, const char* name, int64_t* out) { return ort_call<OrtStatus*>(86, i, name, out); }
inline OrtStatus* num_outputs(const OrtKernelContext* c, size_t* out) { return ort_call<OrtStatus*>(89, c, out); }
inline OrtStatus* input(const OrtKernelContext* c, size_t i, const OrtValue** out) { return ort_call<OrtStatus*>(90, c, i, out); }
inline OrtStatus* output(OrtKernelContext* c, size_t i, const int64_t* dims, size_t rank, OrtValue** out) {
  return ort_call<OrtStatus*>(91, c, i, dims, rank, out);
}
inline OrtStatus* attributes(const OrtKernelInfo* i, const char* name, int64_t* out, size_t* count) {
  return ort_call<OrtStatus*>(163, i, name, out, count);
}
inline OrtStatus* num_inputs(const OrtKernelInfo* i, size_t* out) { return ort_call<OrtStatus*>(230, i, out); }
inline OrtStatus* num_outputs(const OrtKernelInfo* i, size_t* out) { return ort_call<OrtStatus*>(231, i, out); }
inline OrtStatus* constant_input(const OrtKernelInfo* i, size_t at, int* is_constant, const OrtValue** out) {
  return ort_call<OrtStatus*>(249, i, at, is_constant, out);
}

}  // namespace edgespec
